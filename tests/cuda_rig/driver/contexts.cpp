// Contexts: each device's primary one, others, and each thread's stack of them. A context has no memory of its own.
#include "handles.h"

using namespace played;

namespace {

// Without a destructor: others' static destructors still call the driver after a thread's are through.
struct Stack {
  CUcontext contexts[64];
  int depth;
  void push(CUcontext context) {
    if (depth < 64) contexts[depth++] = context;
  }
};
thread_local Stack stack;

// Run `body` with a context, or with the current one instead of none.
template <class Body>
CUresult with_context(CUcontext context, Body body) {
  if (context == nullptr) context = current();
  return context == nullptr ? CUDA_ERROR_INVALID_CONTEXT : body(context);
}

CUresult create(CUcontext* out, unsigned flags, CUdevice device) {
  auto* context = new CUctx_st;
  context->device = device;
  context->flags = flags;
  stack.push(context);
  return answer(out, context);
}

CUresult synchronize(CUcontext context) {
  return with_context(context, [](CUcontext found) {
    wait_for_all(found);
    return CUDA_SUCCESS;
  });
}

bool is_device(int device) { return device >= 0 && device < device_count(); }

}  // namespace

namespace played {

CUcontext current() { return stack.depth == 0 ? nullptr : stack.contexts[stack.depth - 1]; }
int current_device() { return current() == nullptr ? -1 : current()->device; }

CUcontext primary(int device) {
  static std::mutex mutex;
  static auto* all = new std::map<int, CUcontext>;
  const Guard guard(mutex);
  CUcontext& context = (*all)[device];
  if (context == nullptr) {
    context = new CUctx_st;
    context->device = device;
  }
  return context;
}

}  // namespace played

// -- primary ones

CUresult cuDevicePrimaryCtxRetain(CUcontext* out, CUdevice device) {
  return play(__func__, [&] {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    const Guard guard(lock());
    ++primary(device)->retained;
    return answer(out, primary(device));
  });
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return play(__func__, [&] {
    const Guard guard(lock());
    if (primary(device)->retained > 0) --primary(device)->retained;
    return CUDA_SUCCESS;
  });
}

// Of CUDA before 11; PyTorch looks it up when a graph is destroyed.
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return cuDevicePrimaryCtxRelease_v2(device); }

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
  return play(__func__, [&] { return answer(&primary(device)->flags, flags); });
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return play(__func__, [&] {
    if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
    *flags = primary(device)->flags;
    return answer(active, primary(device)->retained > 0);
  });
}

// -- a thread's stack

CUresult cuCtxGetCurrent(CUcontext* out) {
  return play(__func__, [&] { return answer(out, current()); });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return play(__func__, [&] {
    if (stack.depth > 0) --stack.depth;
    if (context != nullptr) stack.push(context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  return play(__func__, [&] {
    stack.push(context);
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxPopCurrent_v2(CUcontext* out) {
  return play(__func__, [&] {
    if (stack.depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
    if (out != nullptr) *out = current();
    --stack.depth;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxCreate_v4(CUcontext* out, CUctxCreateParams*, unsigned flags, CUdevice device) {
  return play(__func__, [&] { return create(out, flags, device); });
}

CUresult cuCtxCreate_v3(CUcontext* out, CUexecAffinityParam*, int, unsigned flags, CUdevice device) {
  return play(__func__, [&] { return create(out, flags, device); });
}

CUresult cuCtxCreate_v2(CUcontext* out, unsigned flags, CUdevice device) {
  return play(__func__, [&] { return create(out, flags, device); });
}

// -- questions to a context

CUresult cuCtxGetDevice(CUdevice* out) {
  return play(__func__, [&] { return with_context(nullptr, [&](CUcontext found) { return answer(out, found->device); }); });
}

CUresult cuCtxGetDevice_v2(CUdevice* out, CUcontext context) {
  return play(__func__, [&] { return with_context(context, [&](CUcontext found) { return answer(out, found->device); }); });
}

CUresult cuCtxGetFlags(unsigned* out) {
  return play(__func__, [&] { return with_context(nullptr, [&](CUcontext found) { return answer(out, found->flags); }); });
}

CUresult cuCtxGetId(CUcontext context, unsigned long long* out) {
  return play(__func__, [&] { return with_context(context, [&](CUcontext found) { return answer(out, found->device + 1); }); });
}

CUresult cuCtxGetApiVersion(CUcontext, unsigned* out) {
  return play(__func__, [&] { return answer(out, 3020); });
}

CUresult cuCtxSynchronize() {
  return play_unsafe(__func__, [] { return synchronize(nullptr); });
}

CUresult cuCtxSynchronize_v2(CUcontext context) {
  return play_unsafe(__func__, [&] { return synchronize(context); });
}

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return play(__func__, [&] {
    if (least != nullptr) *least = 0;
    if (greatest != nullptr) *greatest = -5;
    return CUDA_SUCCESS;
  });
}

CUresult cuCtxGetLimit(size_t* out, CUlimit limit) {
  return play(__func__, [&] {
    const bool heap = limit == CU_LIMIT_MALLOC_HEAP_SIZE;
    return answer(out, limit == CU_LIMIT_STACK_SIZE ? 1024 : heap ? 8 << 20 : 1 << 20);
  });
}

CUresult cuCtxGetCacheConfig(CUfunc_cache* out) {
  return play(__func__, [&] { return answer(out, CU_FUNC_CACHE_PREFER_NONE); });
}

CUresult cuCtxGetSharedMemConfig(CUsharedconfig* out) {
  return play(__func__, [&] { return answer(out, CU_SHARED_MEM_CONFIG_FOUR_BYTE_BANK_SIZE); });
}
