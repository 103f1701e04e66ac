// Allocations: a device's, the host's, managed ones, and those out of pools. All of it is memory of the host's.
//
// Pools keep their attributes and nothing else. An allocation in stream order is there at once, its release comes in order.
#include "memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

using namespace played;

struct CUmemPoolHandle_st {
  int device;
  std::map<int, uint64_t> attributes;
};

namespace {

constexpr size_t kDeviceBytes = 85520809984;  // of an H100 with 80 GB
constexpr size_t kReserved = 500 << 20;       // that a context takes on a real device

Arena& arena_of(int device) {
  Arena& arena = memory().arenas[device];
  if (arena.base != nullptr) return arena;
  arena.fd = memfd_create(("played-gpu" + std::to_string(device)).c_str(), MFD_CLOEXEC);
  if (ftruncate(arena.fd, kDeviceBytes) != 0) abort();
  void* const room = mmap(nullptr, kDeviceBytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  arena.base = host(rounded(address(room), kPage));
  const int flags = MAP_SHARED | MAP_FIXED | MAP_NORESERVE;
  if (mmap(arena.base, kDeviceBytes, PROT_READ | PROT_WRITE, flags, arena.fd, 0) == MAP_FAILED) abort();
  madvise(arena.base, kDeviceBytes, MADV_DONTDUMP);
  arena.free[0] = kDeviceBytes;
  return arena;
}

// Back to the free list, joined with its neighbours. The pages are given back, and read as zero again.
void give_back(Arena& arena, size_t begin, size_t size) {
  const size_t first = rounded(begin, kHostPage), last = (begin + size) / kHostPage * kHostPage;
  if (last > first) {
    fallocate(arena.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first), static_cast<off_t>(last - first));
  }
  auto after = arena.free.lower_bound(begin);
  if (after != arena.free.end() && after->first == begin + size) {
    size += after->second;
    after = arena.free.erase(after);
  }
  if (after != arena.free.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == begin) {
      before->second += size;
      return;
    }
  }
  arena.free[begin] = size;
}

CUresult release(CUdeviceptr at) {
  const Guard guard(memory().mutex);
  const auto it = memory().areas.find(at);
  if (it == memory().areas.end()) return CUDA_ERROR_INVALID_VALUE;
  const Area area = it->second;
  if (area.kind != Kind::kDevice && area.kind != Kind::kManaged) return CUDA_ERROR_INVALID_VALUE;
  memory().areas.erase(it);
  if (area.kind == Kind::kManaged) {
    munmap(host(at), area.size);
    return CUDA_SUCCESS;
  }
  Arena& arena = arena_of(area.device);
  memory().used[area.device] -= area.size;
  give_back(arena, static_cast<size_t>(host(at) - arena.base), area.size);
  return CUDA_SUCCESS;
}

CUmemoryPool pool_of(int device) {
  static auto* pools = new std::map<int, CUmemoryPool>;
  const Guard guard(memory().mutex);
  CUmemoryPool& pool = (*pools)[device];
  if (pool == nullptr) pool = new CUmemPoolHandle_st{device, {}};
  return pool;
}

// The first attributes are int, the others uint64_t.
bool is_int(CUmemPool_attribute attribute) { return attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES; }

CUresult map_host(CUdeviceptr* out, size_t size, Kind kind, int device) {
  size = rounded(std::max<size_t>(size, 1), kHostPage);
  void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const Guard guard(memory().mutex);
  memory().add(address(at), size, kind, device);
  return answer(out, address(at));
}

}  // namespace

namespace played {

Memory& memory() {
  static Memory* one = new Memory;
  return *one;
}

std::map<CUdeviceptr, Area>::iterator Memory::find(CUdeviceptr at) {
  auto it = areas.upper_bound(at);
  if (it == areas.begin()) return areas.end();
  --it;
  return at < it->first + it->second.size ? it : areas.end();
}

void Memory::add(CUdeviceptr at, size_t size, Kind kind, int device, void* handle) { areas[at] = {size, kind, device, ++ids, handle}; }

bool known(const void* at) {
  const Guard guard(memory().mutex);
  return memory().find(address(at)) != memory().areas.end();
}

int device_of(CUdeviceptr at) {
  const Guard guard(memory().mutex);
  const auto area = memory().find(at);
  return area == memory().areas.end() ? -1 : area->second.device;
}

CUresult allocate(CUdeviceptr* out, size_t size, int device) {
  if (size == 0) return CUDA_ERROR_INVALID_VALUE;
  if (device < 0) return CUDA_ERROR_INVALID_CONTEXT;
  const size_t alignment = size >= kPage / 2 ? kPage : kSmall;
  size = rounded(size, alignment);
  const Guard guard(memory().mutex);
  Arena& arena = arena_of(device);
  for (auto it = arena.free.begin(); it != arena.free.end(); ++it) {
    const auto [begin, room] = *it;
    const size_t at = rounded(begin, alignment);
    if (at + size > begin + room) continue;
    arena.free.erase(it);
    if (at > begin) arena.free[begin] = at - begin;
    if (at + size < begin + room) arena.free[at + size] = begin + room - at - size;
    memory().used[device] += size;
    memory().add(address(arena.base + at), size, Kind::kDevice, device);
    return answer(out, address(arena.base + at));
  }
  return CUDA_ERROR_OUT_OF_MEMORY;
}

}  // namespace played

// -- the device's

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  return play(__func__, [&] {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    const Guard guard(memory().mutex);
    *total = kDeviceBytes;
    return answer(free, kDeviceBytes - kReserved - memory().used[current_device()]);
  });
}

CUresult cuDeviceTotalMem_v2(size_t* out, CUdevice) {
  return play(__func__, [&] { return answer(out, kDeviceBytes); });
}

CUresult cuMemAlloc_v2(CUdeviceptr* out, size_t size) {
  return play_unsafe(__func__, [&] { return allocate(out, size, current_device()); });
}

CUresult cuMemAllocPitch_v2(CUdeviceptr* out, size_t* pitch, size_t width, size_t height, unsigned) {
  *pitch = rounded(width, kSmall);
  return cuMemAlloc_v2(out, *pitch * height);
}

CUresult cuMemFree_v2(CUdeviceptr at) {
  return play_unsafe(__func__, [&] {
    if (at == 0) return CUDA_SUCCESS;
    const int device = device_of(at);
    if (device >= 0) wait_for_all(primary(device));
    return release(at);
  });
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr at) {
  return play(__func__, [&] {
    const Guard guard(memory().mutex);
    const auto area = memory().find(at);
    if (area == memory().areas.end()) return CUDA_ERROR_NOT_FOUND;
    if (base != nullptr) *base = area->first;
    if (size != nullptr) *size = area->second.size;
    return CUDA_SUCCESS;
  });
}

CUresult cuMemAllocManaged(CUdeviceptr* out, size_t size, unsigned) {
  return play(__func__, [&] { return map_host(out, size, Kind::kManaged, current_device()); });
}

// -- in stream order, from pools

CUresult cuMemAllocFromPoolAsync(CUdeviceptr* out, size_t size, CUmemoryPool pool, CUstream) {
  return play(__func__, [&] { return allocate(out, size, pool->device); });
}

CUresult cuMemAllocAsync(CUdeviceptr* out, size_t size, CUstream) {
  return play(__func__, [&] { return allocate(out, size, current_device()); });
}

CUresult cuMemFreeAsync(CUdeviceptr at, CUstream stream) {
  return play(__func__, [&] {
    Work work;
    work.type = CU_GRAPH_NODE_TYPE_MEM_FREE;
    work.effect = [at] { release(at); };
    return put(stream, std::move(work));
  });
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool* out, CUdevice device) {
  return play(__func__, [&] { return answer(out, pool_of(device)); });
}

CUresult cuDeviceGetMemPool(CUmemoryPool* out, CUdevice device) {
  return play(__func__, [&] { return answer(out, pool_of(device)); });
}

CUresult cuMemPoolCreate(CUmemoryPool* out, const CUmemPoolProps* props) {
  return play(__func__, [&] {
    const bool on_device = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    return answer(out, new CUmemPoolHandle_st{on_device ? props->location.id : 0, {}});
  });
}

CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  return play(__func__, [&] {
    const Guard guard(memory().mutex);
    uint64_t& kept = pool->attributes[attribute];
    kept = is_int(attribute) ? static_cast<uint64_t>(*static_cast<int*>(value)) : *static_cast<uint64_t*>(value);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void* value) {
  return play(__func__, [&] {
    const Guard guard(memory().mutex);
    const uint64_t kept = pool->attributes[attribute];
    return is_int(attribute) ? answer(static_cast<int*>(value), kept) : answer(static_cast<uint64_t*>(value), kept);
  });
}

// -- the host's

CUresult cuMemHostAlloc(void** out, size_t size, unsigned) {
  return play(__func__, [&] { return map_host(reinterpret_cast<CUdeviceptr*>(out), size, Kind::kHost, -1); });
}

CUresult cuMemAllocHost_v2(void** out, size_t size) { return cuMemHostAlloc(out, size, 0); }

CUresult cuMemFreeHost(void* at) {
  return play(__func__, [&] {
    if (current() != nullptr) wait_for_all(current());
    const Guard guard(memory().mutex);
    const auto it = memory().areas.find(address(at));
    if (it == memory().areas.end() || it->second.kind != Kind::kHost) return CUDA_ERROR_INVALID_VALUE;
    munmap(at, it->second.size);
    memory().areas.erase(it);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostRegister_v2(void* at, size_t size, unsigned) {
  return play(__func__, [&] {
    const Guard guard(memory().mutex);
    if (memory().areas.count(address(at)) != 0) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    memory().add(address(at), size, Kind::kRegistered, -1);
    return CUDA_SUCCESS;
  });
}

CUresult cuMemHostUnregister(void* at) {
  return play(__func__, [&] {
    const Guard guard(memory().mutex);
    return memory().areas.erase(address(at)) == 1 ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  });
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* out, void* at, unsigned) {
  return play(__func__, [&] { return answer(out, address(at)); });
}

CUresult cuMemHostGetFlags(unsigned* out, void*) {
  return play(__func__, [&] { return answer(out, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE); });
}
