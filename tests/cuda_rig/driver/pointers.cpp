// What is known of a pointer. A mapped area counts as memory of its device; nothing is said about access from other devices.
#include <algorithm>

#include "memory.h"

using namespace played;

namespace {

struct Found {
  Area area;
  CUdeviceptr base, at;

  bool on_device() const { return area.device >= 0; }
  int device() const { return on_device() ? area.device : std::max(current_device(), 0); }
};

template <class T, class V>
CUresult store(void* out, V value) {
  return answer(static_cast<T*>(out), value);
}

CUresult describe(void* out, CUpointer_attribute attribute, const Found& found) {
  const Area& area = found.area;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      return store<CUcontext>(out, area.kind == Kind::kMapped ? nullptr : primary(found.device()));
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: return store<unsigned>(out, found.on_device() ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST);
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: return store<CUdeviceptr>(out, found.at);
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (found.on_device() && area.kind != Kind::kManaged) return CUDA_ERROR_INVALID_VALUE;
      return store<CUdeviceptr>(out, found.at);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: return store<uint64_t>(out, area.id);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: return store<unsigned>(out, area.kind == Kind::kManaged);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return store<int>(out, found.device());
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: return store<unsigned>(out, area.kind == Kind::kDevice);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: return store<CUdeviceptr>(out, found.base);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: return store<size_t>(out, area.size);
    case CU_POINTER_ATTRIBUTE_MAPPED: return store<unsigned>(out, 1);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      return store<uint64_t>(out, area.kind == Kind::kMapped ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: return store<unsigned>(out, CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: return store<void*>(out, nullptr);
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: return store<int>(out, 0);
    default: return CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult about(void* out, CUpointer_attribute attribute, CUdeviceptr at) {
  Found found{};
  {
    const Guard guard(memory().mutex);
    const auto it = memory().find(at);
    if (it == memory().areas.end()) return CUDA_ERROR_INVALID_VALUE;
    found = {it->second, it->first, at};
  }
  return describe(out, attribute, found);
}

// What cuPointerGetAttributes returns of memory that the driver does not know, which is no error there.
void describe_unknown(void* out, CUpointer_attribute attribute) {
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: store<int>(out, CU_DEVICE_INVALID); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
    case CU_POINTER_ATTRIBUTE_MAPPED:
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: store<unsigned>(out, 0); break;
    default: store<uint64_t>(out, 0); break;
  }
}

}  // namespace

CUresult cuPointerGetAttribute(void* out, CUpointer_attribute attribute, CUdeviceptr at) {
  return play(__func__, [&] { return about(out, attribute, at); });
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** out, CUdeviceptr at) {
  return play(__func__, [&] {
    for (unsigned i = 0; i < count; ++i) {
      if (about(out[i], attributes[i], at) != CUDA_SUCCESS) describe_unknown(out[i], attributes[i]);
    }
    return CUDA_SUCCESS;
  });
}
