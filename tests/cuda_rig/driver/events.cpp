// Events: recorded, asked, waited for, subtracted. Event handles for other processes are not played.
#include <algorithm>

#include "handles.h"

using namespace played;

namespace {

Work event_work(CUgraphNodeType type, CUevent event) {
  Work work;
  work.type = type;
  work.name = type == CU_GRAPH_NODE_TYPE_EVENT_RECORD ? "event" : "wait";
  work.event = event;
  // In the one queue, plain events and waits take no place, or nothing would ever overlap; events with a clock do. A guess.
  work.queues = type == CU_GRAPH_NODE_TYPE_EVENT_RECORD && event->timed();
  return work;
}

Ns moment(CUevent event) { return std::max(event->recorded, event->op->end); }

CUresult elapsed(float* ms, CUevent from, CUevent to) {
  const Guard guard(lock());
  if (!exists(from) || !exists(to)) return CUDA_ERROR_INVALID_HANDLE;
  if (from->capture != 0 || to->capture != 0) return CUDA_ERROR_CAPTURED_EVENT;
  if (!from->timed() || !to->timed() || !from->op || !to->op) return CUDA_ERROR_INVALID_HANDLE;
  if (!over(from->op) || !over(to->op)) return CUDA_ERROR_NOT_READY;
  return answer(ms, static_cast<double>(moment(to) - moment(from)) / 1e6);
}

CUresult record(CUevent event, CUstream stream, unsigned flags) {
  if (!exists(event) || event->context->device != stream->context->device) return CUDA_ERROR_INVALID_HANDLE;
  Work work = event_work(CU_GRAPH_NODE_TYPE_EVENT_RECORD, event);
  if (stream->capture == nullptr) {
    event->capture = 0;
    event->recorded = now();
    // An event takes no time, and needs no work of its own if it comes after one piece of work.
    event->op = settings().one_queue ? nullptr : last_of(stream);
    if (!event->op) event->op = enqueue(stream, std::move(work));
    return CUDA_SUCCESS;
  }
  if ((flags & CU_EVENT_RECORD_EXTERNAL) != 0) return put_locked(stream, std::move(work));
  if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  event->capture = stream->capture->id;
  event->capture_after = stream->capture_after;
  return CUDA_SUCCESS;
}

CUresult wait_on(CUstream stream, CUevent event, unsigned flags) {
  if (!exists(event)) return CUDA_ERROR_INVALID_HANDLE;
  Work work = event_work(CU_GRAPH_NODE_TYPE_WAIT_EVENT, event);
  if ((flags & CU_EVENT_WAIT_EXTERNAL) != 0 && stream->capture != nullptr) return put_locked(stream, std::move(work));
  if (event->capture != 0) return join_capture(stream, event);
  if (stream->capture != nullptr) {
    if (stream->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!event->op) return CUDA_SUCCESS;
    stream->capture->invalid = true;
    note_disturbed("cuStreamWaitEvent (isolation)");
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (!over(event->op)) enqueue(stream, std::move(work), {event->op});
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cuEventCreate(CUevent* out, unsigned flags) {
  return play(__func__, [&] {
    if (current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    auto* event = new CUevent_st;
    event->context = current();
    event->flags = flags;
    ++(event->timed() ? totals().events_timed : totals().events_plain);
    ++totals().events_alive;
    return answer(out, event);
  });
}

CUresult cuEventDestroy_v2(CUevent event) {
  return play(__func__, [&] {
    const Guard guard(lock());
    if (!exists(event)) return CUDA_ERROR_INVALID_HANDLE;
    --totals().events_alive;
    event->destroyed = true;
    event->op = nullptr;
    return CUDA_SUCCESS;
  });
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned flags) {
  return play(__func__, [&] { return with_stream(handle, [&](CUstream stream) { return record(event, stream, flags); }); });
}

CUresult cuEventRecord(CUevent event, CUstream stream) { return cuEventRecordWithFlags(event, stream, 0); }

CUresult cuEventQuery(CUevent event) {
  return play_unsafe(__func__, [&] {
    if (const Ns slow = query_ns()) wait_until(now() + slow);
    const Guard guard(lock());
    if (!exists(event)) return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture != 0) return CUDA_ERROR_CAPTURED_EVENT;
    return over(event->op) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventSynchronize(CUevent event) {
  return play_unsafe(__func__, [&] {
    OpRef op;
    {
      const Guard guard(lock());
      if (!exists(event)) return CUDA_ERROR_INVALID_HANDLE;
      if (event->capture != 0) return CUDA_ERROR_CAPTURED_EVENT;
      op = event->op;
    }
    wait_for(op);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventElapsedTime_v2(float* ms, CUevent from, CUevent to) {
  return play(__func__, [&] { return elapsed(ms, from, to); });
}

CUresult cuEventElapsedTime(float* ms, CUevent from, CUevent to) { return cuEventElapsedTime_v2(ms, from, to); }

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned flags) {
  return play(__func__, [&] { return with_stream(handle, [&](CUstream stream) { return wait_on(stream, event, flags); }); });
}
