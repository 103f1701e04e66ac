// Streams: their order, the default stream's rule, callbacks, and waits for values in memory.
//
// A stream's attributes are not kept, and CU_STREAM_LEGACY and a null handle are the same.
#include <string.h>

#include <algorithm>
#include <type_traits>
#include <unordered_set>

#include "handles.h"

using namespace played;

namespace {

std::unordered_set<CUstream>& streams() {
  static auto* all = new std::unordered_set<CUstream>;
  return *all;
}

CUstream make_stream(CUcontext context, unsigned flags, int priority) {
  static uint64_t ids = 0;
  auto* stream = new CUstream_st;
  stream->context = context;
  stream->flags = flags;
  stream->priority = std::clamp(priority, -5, 0);
  stream->id = ++ids;
  streams().insert(stream);
  if (stream->blocking()) context->blocking.insert(stream);
  return stream;
}

CUstream legacy_of(CUcontext context) {
  if (context->legacy == nullptr) {
    context->legacy = make_stream(context, 0, 0);
    context->blocking.erase(context->legacy);
  }
  return context->legacy;
}

// All that the default stream waits for, and it itself.
std::vector<OpRef> last_of_all(CUcontext context) {
  std::vector<OpRef> last{legacy_of(context)->last};
  for (CUstream other : context->blocking) last.push_back(other->last);
  return last;
}

// A function of the host's, in stream order.
class HostCall : public Open {
 public:
  explicit HostCall(std::function<void()> function) : function_(std::move(function)) {}
  std::function<void()> errand() override {
    if (!function_) return {};
    return [function = std::exchange(function_, nullptr), ended = ended_] {
      function();
      ended->store(now());
    };
  }
  Ns poll(Op&) override { return ended_->load(); }

 private:
  std::function<void()> function_;
  const std::shared_ptr<std::atomic<Ns>> ended_ = std::make_shared<std::atomic<Ns>>(kUnknown);
};

template <class T>
class ValueWait : public Open {
 public:
  ValueWait(CUdeviceptr at, T value, unsigned flags) : at_(reinterpret_cast<const volatile T*>(at)), value_(value), flags_(flags & 3) {}
  Ns poll(Op& op) override { return holds(*at_) && now() >= op.begin ? now() : kUnknown; }

 private:
  bool holds(T seen) const {
    switch (flags_) {
      case CU_STREAM_WAIT_VALUE_GEQ: return static_cast<std::make_signed_t<T>>(seen - value_) >= 0;
      case CU_STREAM_WAIT_VALUE_EQ: return seen == value_;
      case CU_STREAM_WAIT_VALUE_AND: return (seen & value_) != 0;
      default: return static_cast<T>(~(seen | value_)) != 0;
    }
  }
  const volatile T* const at_;
  const T value_;
  const unsigned flags_;
};

Work host_call(std::function<void()> function) {
  Work work;
  work.type = CU_GRAPH_NODE_TYPE_HOST;
  work.name = "host function";
  work.open = [function] { return std::make_unique<HostCall>(function); };
  return work;
}

template <class T>
CUresult write_value(CUstream stream, CUdeviceptr at, T value) {
  Work work;
  work.effect = [at, value] {
    *reinterpret_cast<volatile T*>(at) = value;
    wake();
  };
  return put(stream, std::move(work));
}

template <class T>
CUresult wait_value(CUstream stream, CUdeviceptr at, T value, unsigned flags) {
  Work work;
  work.open = [at, value, flags] { return std::make_unique<ValueWait<T>>(at, value, flags); };
  return put(stream, std::move(work));
}

CUresult batched(CUstream stream, const CUstreamBatchMemOpParams& op) {
  const auto& wait = op.waitValue;
  const auto& write = op.writeValue;
  switch (op.operation) {
    case CU_STREAM_MEM_OP_WAIT_VALUE_32: return wait_value<uint32_t>(stream, wait.address, wait.value, wait.flags);
    case CU_STREAM_MEM_OP_WAIT_VALUE_64: return wait_value<uint64_t>(stream, wait.address, wait.value64, wait.flags);
    case CU_STREAM_MEM_OP_WRITE_VALUE_32: return write_value<uint32_t>(stream, write.address, write.value);
    case CU_STREAM_MEM_OP_WRITE_VALUE_64: return write_value<uint64_t>(stream, write.address, write.value64);
    default: return CUDA_SUCCESS;  // barriers and flushes: memory is the host's
  }
}

}  // namespace

namespace played {

CUstream stream_of(CUstream handle) {
  const CUcontext context = current();
  if (handle == nullptr || handle == CU_STREAM_LEGACY) return context == nullptr ? nullptr : legacy_of(context);
  if (handle != CU_STREAM_PER_THREAD) return streams().count(handle) != 0 ? handle : nullptr;
  if (context == nullptr) return nullptr;
  static thread_local auto* const mine = new std::map<CUcontext, CUstream>;
  CUstream& stream = (*mine)[context];
  if (stream == nullptr) stream = make_stream(context, 0, 0);
  return stream;
}

std::vector<CUstream> streams_of(CUcontext context) {
  std::vector<CUstream> found;
  for (CUstream stream : streams()) {
    if (stream->context == context && stream != context->legacy) found.push_back(stream);
  }
  return found;
}

OpRef last_of(CUstream stream) {
  const CUcontext context = stream->context;
  const bool legacy = stream == legacy_of(context);
  if (legacy ? !context->blocking.empty() : stream->blocking()) return nullptr;
  return stream->last;
}

OpRef enqueue(CUstream stream, Work work, std::vector<OpRef> after) {
  after.push_back(stream->last);
  if (stream == legacy_of(stream->context)) {
    for (const OpRef& last : last_of_all(stream->context)) after.push_back(last);
  } else if (stream->blocking()) {
    after.push_back(stream->context->legacy->last);
  }
  return stream->last = add(stream->context->device, std::move(work), std::move(after));
}

CUresult put(CUstream handle, Work work) {
  return with_stream(handle, [&](CUstream stream) { return put_locked(stream, std::move(work)); });
}

void wait_for_all(CUcontext context) {
  std::vector<OpRef> last;
  {
    const Guard guard(lock());
    last.push_back(legacy_of(context)->last);
    for (CUstream stream : streams_of(context)) last.push_back(stream->last);
  }
  for (const OpRef& op : last) wait_for(op);
}

}  // namespace played

// -- streams

CUresult cuStreamCreateWithPriority(CUstream* out, unsigned flags, int priority) {
  return play(__func__, [&] {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    const Guard guard(lock());
    return answer(out, make_stream(current(), flags, priority));
  });
}

CUresult cuStreamCreate(CUstream* out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }

CUresult cuStreamDestroy_v2(CUstream handle) {
  return play(__func__, [&] {
    return with_stream(handle, [&](CUstream stream) {
      leave_capture(stream);
      streams().erase(stream);
      stream->context->blocking.erase(stream);
      delete stream;
      return CUDA_SUCCESS;
    });
  });
}

CUresult cuStreamGetPriority(CUstream handle, int* out) {
  return play(__func__, [&] { return with_stream(handle, [&](CUstream stream) { return answer(out, stream->priority); }); });
}

CUresult cuStreamGetFlags(CUstream handle, unsigned* out) {
  return play(__func__, [&] { return with_stream(handle, [&](CUstream stream) { return answer(out, stream->flags); }); });
}

CUresult cuStreamGetId(CUstream handle, unsigned long long* out) {
  return play(__func__, [&] { return with_stream(handle, [&](CUstream stream) { return answer(out, stream->id); }); });
}

CUresult cuStreamGetCtx(CUstream handle, CUcontext* out) {
  return play(__func__, [&] { return with_stream(handle, [&](CUstream stream) { return answer(out, stream->context); }); });
}

CUresult cuStreamGetDevice(CUstream handle, CUdevice* out) {
  return play(__func__, [&] { return with_stream(handle, [&](CUstream stream) { return answer(out, stream->context->device); }); });
}

CUresult cuStreamGetAttribute(CUstream handle, CUstreamAttrID, CUstreamAttrValue* out) {
  return play(__func__, [&] {
    return with_stream(handle, [&](CUstream) {
      memset(out, 0, sizeof *out);
      return CUDA_SUCCESS;
    });
  });
}

CUresult cuStreamSetAttribute(CUstream handle, CUstreamAttrID, const CUstreamAttrValue*) {
  return play(__func__, [&] { return with_stream(handle, [&](CUstream) { return CUDA_SUCCESS; }); });
}

CUresult cuStreamQuery(CUstream handle) {
  const char* const me = __func__;
  return play_unsafe(me, [&] {
    return with_stream(handle, [&](CUstream stream) {
      if (const CUresult broken = broken_by(stream, me)) return broken;
      return over(stream->last) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
    });
  });
}

CUresult cuStreamSynchronize(CUstream handle) {
  const char* const me = __func__;
  return play_unsafe(me, [&] {
    std::vector<OpRef> last;
    const CUresult result = with_stream(handle, [&](CUstream stream) {
      last = stream == stream->context->legacy ? last_of_all(stream->context) : std::vector<OpRef>{stream->last};
      return broken_by(stream, me);
    });
    for (size_t i = 0; result == CUDA_SUCCESS && i < last.size(); ++i) wait_for(last[i]);
    return result;
  });
}

// -- functions of the host's, and values in memory

CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void* data) {
  return play(__func__, [&] { return put(stream, host_call([function, data] { function(data); })); });
}

CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback function, void* data, unsigned) {
  const char* const me = __func__;
  return play(me, [&] {
    return with_stream(handle, [&](CUstream stream) {
      if (const CUresult broken = broken_by(stream, me)) return broken;
      enqueue(stream, host_call([=] { function(handle, CUDA_SUCCESS, data); }));
      return CUDA_SUCCESS;
    });
  });
}

CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned) {
  return play(__func__, [&] { return write_value<uint32_t>(stream, at, value); });
}

CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned) {
  return play(__func__, [&] { return write_value<uint64_t>(stream, at, value); });
}

CUresult cuStreamWaitValue32_v2(CUstream stream, CUdeviceptr at, cuuint32_t value, unsigned flags) {
  return play(__func__, [&] { return wait_value<uint32_t>(stream, at, value, flags); });
}

CUresult cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags) {
  return play(__func__, [&] { return wait_value<uint64_t>(stream, at, value, flags); });
}

CUresult cuStreamBatchMemOp_v2(CUstream stream, unsigned count, CUstreamBatchMemOpParams* ops, unsigned) {
  return play(__func__, [&] {
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; ++i) result = batched(stream, ops[i]);
    return result;
  });
}
