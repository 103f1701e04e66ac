// The areas of memory that the driver knows, shared by the files that allocate, map, copy and describe them.
#pragma once

#include <map>

#include "handles.h"

namespace played {

constexpr size_t kPage = 2 << 20, kSmall = 512, kHostPage = 4096;

inline size_t rounded(size_t size, size_t to) { return (size + to - 1) / to * to; }
inline char* host(CUdeviceptr at) { return reinterpret_cast<char*>(at); }
inline CUdeviceptr address(const void* at) { return reinterpret_cast<CUdeviceptr>(at); }

enum class Kind { kDevice, kHost, kRegistered, kManaged, kMapped, kIpc };

struct Area {
  size_t size = 0;
  Kind kind = Kind::kHost;
  int device = -1;  // -1: the host's
  uint64_t id = 0;
  void* handle = nullptr;  // of what is mapped here
};

// A device's memory: one sparse memfd, so that another process can map it.
struct Arena {
  char* base = nullptr;
  int fd = -1;
  std::map<size_t, size_t> free;  // offset: size
};

// Everything in it needs its lock, which may be taken while the engine's is held, and not the other way round.
struct Memory {
  std::mutex mutex;
  std::map<CUdeviceptr, Area> areas;
  std::map<int, Arena> arenas;
  std::map<int, size_t> used;  // by device
  uint64_t ids = 0;

  std::map<CUdeviceptr, Area>::iterator find(CUdeviceptr at);  // the area around an address
  void add(CUdeviceptr at, size_t size, Kind kind, int device, void* handle = nullptr);
};
Memory& memory();

bool known(const void* at);           // false: pageable memory of the host's
int device_of(CUdeviceptr at);        // -1: none
CUresult allocate(CUdeviceptr* out, size_t size, int device);

}  // namespace played
