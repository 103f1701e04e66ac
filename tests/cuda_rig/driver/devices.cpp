// The driver itself, and its devices: H100 SXM with 80 GB, as far as it is asked for. Attributes that are not listed are 0.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "generated.h"
#include "handles.h"

using namespace played;

namespace {

// Not an id of a process: every call of the driver looks at it, and `getpid` is a system call.
enum class State { kNew, kReady, kForked };
std::atomic<State> state{State::kNew};

constexpr std::pair<CUdevice_attribute, int> kAttributes[] = {
    // limits of a launch
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    // multiprocessors
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2},
    // memory
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 52428800},
    {CU_DEVICE_ATTRIBUTE_MAX_PERSISTING_L2_CACHE_SIZE, 32768000},
    {CU_DEVICE_ATTRIBUTE_MAX_ACCESS_POLICY_WINDOW_SIZE, 134213632},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, 1},
    {CU_DEVICE_ATTRIBUTE_NUMA_ID, -1},
    // what it can do
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
    {CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT, 4},
    {CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS, 1},
    // textures
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
    {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT, 65536},
};

// CUDA_VISIBLE_DEVICES, as numbers: the devices of this process.
const std::vector<int>& visible() {
  static const auto* all = [] {
    auto* found = new std::vector<int>;
    const char* rest = getenv("CUDA_VISIBLE_DEVICES");
    for (int i = 0; rest == nullptr && i < settings().devices; ++i) found->push_back(i);
    while (rest != nullptr && *rest != 0) {
      char* end;
      const long device = strtol(rest, &end, 10);
      if (end == rest || device < 0 || device >= settings().devices) break;  // as CUDA: what follows is not visible
      found->push_back(static_cast<int>(device));
      rest = *end == ',' ? end + 1 : nullptr;
    }
    return found;
  }();
  return *all;
}

// Run `body` with the number that the device has on the machine.
template <class Body>
CUresult with_device(int device, Body body) {
  if (device < 0 || device >= device_count()) return CUDA_ERROR_INVALID_DEVICE;
  return body(visible()[static_cast<size_t>(device)]);
}

// As in tests/collectors/fake_nvml/two_h100.txt.
int bus_of_physical(int device) {
  static constexpr int kBuses[] = {0x1b, 0x43, 0x52, 0x61, 0x9d, 0xc3, 0xd1, 0xdf};
  return device < 8 ? kBuses[device] : 0xe0 + device - 8;
}

}  // namespace

namespace played {

bool ready() { return state.load(std::memory_order_relaxed) == State::kReady; }
int device_count() { return static_cast<int>(visible().size()); }
int bus_of(int device) { return bus_of_physical(visible()[static_cast<size_t>(device)]); }

}  // namespace played

CUresult cuInit(unsigned) {
  return counted(__func__, [] {
    State before = State::kNew;
    if (state.compare_exchange_strong(before, State::kReady)) {
      pthread_atfork(nullptr, nullptr, [] { state.store(State::kForked); });
    } else if (before == State::kForked) {
      return CUDA_ERROR_NOT_INITIALIZED;
    }
    return device_count() == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
  });
}

CUresult cuDriverGetVersion(int* out) {
  return counted(__func__, [&] { return answer(out, CUDA_VERSION); });
}

CUresult cuGetErrorName(CUresult error, const char** out) {
  *out = error_name(error);
  return *out == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** out) { return cuGetErrorName(error, out); }

CUresult cuDeviceGetCount(int* out) {
  return play(__func__, [&] { return answer(out, device_count()); });
}

CUresult cuDeviceGet(CUdevice* out, int ordinal) {
  return play(__func__, [&] { return with_device(ordinal, [&](int) { return answer(out, ordinal); }); });
}

CUresult cuDeviceGetName(char* out, int size, CUdevice device) {
  return play(__func__, [&] {
    return with_device(device, [&](int) {
      snprintf(out, static_cast<size_t>(size), "NVIDIA H100 80GB HBM3");
      return CUDA_SUCCESS;
    });
  });
}

CUresult cuDeviceGetUuid_v2(CUuuid* out, CUdevice device) {
  return play(__func__, [&] {
    return with_device(device, [&](int physical) {
      static constexpr unsigned char kUuid[16] = {0x5a, 0x0e, 0x1f, 0x2c, 0x3b, 0x4d, 0x4e, 0x6f, 0x8a, 0x9b};
      memcpy(out, kUuid, sizeof kUuid);
      return answer(&out->bytes[15], physical);
    });
  });
}

CUresult cuDeviceGetUuid(CUuuid* out, CUdevice device) { return cuDeviceGetUuid_v2(out, device); }

CUresult cuDeviceGetPCIBusId(char* out, int size, CUdevice device) {
  return play(__func__, [&] {
    return with_device(device, [&](int physical) {
      snprintf(out, static_cast<size_t>(size), "0000:%02X:00.0", bus_of_physical(physical));
      return CUDA_SUCCESS;
    });
  });
}

CUresult cuDeviceGetByPCIBusId(CUdevice* out, const char* id) {
  return play(__func__, [&] {
    unsigned domain = 0, bus = 0;
    if (sscanf(id, "%x:%x:", &domain, &bus) != 2 && sscanf(id, "%x:", &bus) != 1) return CUDA_ERROR_INVALID_VALUE;
    for (int device = 0; device < device_count(); ++device) {
      if (bus_of(device) == static_cast<int>(bus)) return answer(out, device);
    }
    return CUDA_ERROR_INVALID_DEVICE;
  });
}

CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute attribute, CUdevice device) {
  return play(__func__, [&] {
    return with_device(device, [&](int physical) {
      if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) return answer(out, bus_of_physical(physical));
      const auto is_it = [attribute](const auto& known) { return known.first == attribute; };
      const auto* const found = std::find_if(std::begin(kAttributes), std::end(kAttributes), is_it);
      return answer(out, found == std::end(kAttributes) ? 0 : found->second);
    });
  });
}
