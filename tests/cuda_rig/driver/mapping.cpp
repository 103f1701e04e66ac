// Addresses and the memory behind them apart (cuMemCreate, cuMemMap), and memory of other processes and devices.
//
// What cuMemCreate makes is a memfd, and its shareable handle is that file's descriptor. Fabric handles are not played; every
// device reaches every other.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "memory.h"

using namespace played;

namespace {

constexpr char kChunkName[] = "played-chunk";

// What cuMemCreate made, or another process and we have imported.
struct Chunk {
  int fd, device;  // device -1: the host's
  size_t size;
  CUmemAllocationProp prop;
  int references;
};

Chunk* chunk(CUmemGenericAllocationHandle handle) { return reinterpret_cast<Chunk*>(handle); }

CUresult adopt(CUmemGenericAllocationHandle* out, Chunk* made) {
  const Guard guard(memory().mutex);
  if (made->device >= 0) memory().used[made->device] += made->size;
  return answer(out, address(made));
}

// With the memory's lock.
void drop(Chunk* chunk) {
  if (--chunk->references > 0) return;
  if (chunk->device >= 0) memory().used[chunk->device] -= chunk->size;
  close(chunk->fd);
  delete chunk;
}

// The device of a chunk's file, which its name tells; less than -1: it is none of ours.
int device_of_file(int fd) {
  char path[64], name[128] = "";
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  if (readlink(path, name, sizeof name - 1) < 0) return -2;
  const char* const at = strstr(name, kChunkName);
  return at == nullptr ? -2 : atoi(at + sizeof kChunkName - 1);
}

CUresult create(CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp& prop) {
  if ((prop.requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  const int device = prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE ? prop.location.id : -1;
  const int fd = memfd_create((kChunkName + std::to_string(device)).c_str(), MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  return adopt(out, new Chunk{fd, device, size, prop, 1});
}

CUresult import_file(CUmemGenericAllocationHandle* out, int shared) {
  const int fd = fcntl(shared, F_DUPFD_CLOEXEC, 0), device = device_of_file(fd);
  struct stat about;
  if (fd < 0 || device < -1 || fstat(fd, &about) != 0) return CUDA_ERROR_INVALID_VALUE;
  CUmemAllocationProp prop{};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = device >= 0 ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_HOST_NUMA;
  prop.location.id = std::max(device, 0);
  return adopt(out, new Chunk{fd, device, static_cast<size_t>(about.st_size), prop, 1});
}

// A handle for other processes: they map the arena's file, by way of /proc.
struct Ipc {
  int pid, fd, device;
  size_t offset, size;
};
static_assert(sizeof(Ipc) <= sizeof(CUipcMemHandle));

CUresult open_ipc(CUdeviceptr* out, const Ipc& ipc) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", ipc.pid, ipc.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return CUDA_ERROR_MAP_FAILED;
  const size_t skip = ipc.offset % kHostPage, size = rounded(ipc.size + skip, kHostPage);
  void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, static_cast<off_t>(ipc.offset - skip));
  close(fd);
  if (at == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
  const Guard guard(memory().mutex);
  memory().add(address(at) + skip, ipc.size, Kind::kIpc, ipc.device);
  return answer(out, address(at) + skip);
}

// Whether access was as wanted before.
bool exchange_access(CUcontext peer, bool wanted) {
  static auto* enabled = new std::map<std::pair<int, int>, bool>;
  const Guard guard(memory().mutex);
  return std::exchange((*enabled)[{current_device(), peer->device}], wanted);
}

}  // namespace

// -- addresses

CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return play(__func__, [&] { return answer(out, kPage); });
}

CUresult cuMemAddressReserve(CUdeviceptr* out, size_t size, size_t alignment, CUdeviceptr, unsigned long long) {
  return play(__func__, [&] {
    const size_t step = std::max(alignment, kPage);
    void* const room = mmap(nullptr, size + step, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    const CUdeviceptr begin = address(room), at = rounded(begin, step);
    if (at > begin) munmap(room, at - begin);
    munmap(host(at + size), begin + step - at);
    return answer(out, at);
  });
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t size) {
  return play(__func__, [&] {
    munmap(host(at), size);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  return play(__func__, [&] {
    Chunk* const mapped = chunk(handle);
    void* const there = mmap(host(at), size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, mapped->fd, static_cast<off_t>(offset));
    if (there == MAP_FAILED) return CUDA_ERROR_MAP_FAILED;
    const Guard guard(memory().mutex);
    ++mapped->references;
    memory().add(at, size, Kind::kMapped, mapped->device, mapped);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemUnmap(CUdeviceptr at, size_t size) {
  return play(__func__, [&] {
    const Guard guard(memory().mutex);
    auto& areas = memory().areas;
    for (auto it = areas.lower_bound(at); it != areas.end() && it->first < at + size; it = areas.erase(it)) {
      drop(static_cast<Chunk*>(it->second.handle));
    }
    mmap(host(at), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemGetAccess(unsigned long long* out, const CUmemLocation*, CUdeviceptr) {
  return play(__func__, [&] { return answer(out, CU_MEM_ACCESS_FLAGS_PROT_READWRITE); });
}

// -- what is behind them

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t size, const CUmemAllocationProp* prop, unsigned long long) {
  return play(__func__, [&] { return create(out, size, *prop); });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return play(__func__, [&] {
    const Guard guard(memory().mutex);
    drop(chunk(handle));
    return CUDA_SUCCESS;
  });
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long) {
  return play(__func__, [&] {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    return answer(static_cast<int*>(out), fcntl(chunk(handle)->fd, F_DUPFD_CLOEXEC, 0));
  });
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* out, void* shared, CUmemAllocationHandleType type) {
  return play(__func__, [&] {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
    return import_file(out, static_cast<int>(reinterpret_cast<uintptr_t>(shared)));
  });
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* out, CUmemGenericAllocationHandle handle) {
  return play(__func__, [&] { return answer(out, chunk(handle)->prop); });
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* out, void* at) {
  return play(__func__, [&] {
    const Guard guard(memory().mutex);
    const auto area = memory().find(address(at));
    if (area == memory().areas.end() || area->second.kind != Kind::kMapped) return CUDA_ERROR_INVALID_VALUE;
    auto* found = static_cast<Chunk*>(area->second.handle);
    ++found->references;
    return answer(out, address(found));
  });
}

// -- other processes and devices

CUresult cuIpcGetMemHandle(CUipcMemHandle* out, CUdeviceptr at) {
  return play(__func__, [&] {
    const Guard guard(memory().mutex);
    const auto area = memory().find(at);
    if (area == memory().areas.end() || area->second.kind != Kind::kDevice) return CUDA_ERROR_INVALID_VALUE;
    const Arena& arena = memory().arenas[area->second.device];
    const Ipc ipc{getpid(), arena.fd, area->second.device, static_cast<size_t>(host(area->first) - arena.base), area->second.size};
    memset(out, 0, sizeof *out);
    memcpy(out, &ipc, sizeof ipc);
    return CUDA_SUCCESS;
  });
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* out, CUipcMemHandle handle, unsigned) {
  return play(__func__, [&] {
    Ipc ipc;
    memcpy(&ipc, &handle, sizeof ipc);
    return open_ipc(out, ipc);
  });
}

CUresult cuIpcCloseMemHandle(CUdeviceptr at) {
  return play(__func__, [&] {
    const Guard guard(memory().mutex);
    const auto it = memory().areas.find(at);
    if (it == memory().areas.end() || it->second.kind != Kind::kIpc) return CUDA_ERROR_INVALID_VALUE;
    const size_t skip = at % kHostPage;
    munmap(host(at - skip), rounded(it->second.size + skip, kHostPage));
    memory().areas.erase(it);
    return CUDA_SUCCESS;
  });
}

CUresult cuDeviceCanAccessPeer(int* out, CUdevice from, CUdevice to) {
  return play(__func__, [&] { return answer(out, from != to); });
}

CUresult cuDeviceGetP2PAttribute(int* out, CUdevice_P2PAttribute attribute, CUdevice, CUdevice) {
  return play(__func__, [&] {
    const bool atomic = attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
    return answer(out, atomic || attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED);
  });
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned) {
  return play(__func__, [&] { return exchange_access(peer, true) ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS; });
}

CUresult cuCtxDisablePeerAccess(CUcontext peer) {
  return play(__func__, [&] { return exchange_access(peer, false) ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED; });
}
