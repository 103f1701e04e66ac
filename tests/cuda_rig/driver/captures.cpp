// Stream capture, and what may not be called meanwhile.
//
// The rule, from CUDA's documentation and from what PyTorch had to work around: a potentially unsafe call fails, and breaks the
// capture, if the capture was begun in this thread and is not relaxed, or is global and this thread's mode is global. A thread whose
// mode is relaxed may call everything. Not played: conditional nodes, and the default stream's own capture.
#include <algorithm>

#include "handles.h"

using namespace played;

namespace {

std::vector<Capture*> captures;     // under way; with the lock
std::atomic<int> captures_now{0};  // their number, without the lock
thread_local CUstreamCaptureMode mode_here = CU_STREAM_CAPTURE_MODE_GLOBAL;

void invalidate(Capture& capture, const char* function) {
  if (!capture.invalid) note_disturbed(function);
  capture.invalid = true;
}

bool forbids(const Capture& capture) {
  if (capture.thread == thread_id()) return capture.mode != CU_STREAM_CAPTURE_MODE_RELAXED;
  return capture.mode == CU_STREAM_CAPTURE_MODE_GLOBAL && mode_here == CU_STREAM_CAPTURE_MODE_GLOBAL;
}

// A capture that work on the default stream would depend on; null: there is none.
Capture* minds_legacy(CUstream stream) {
  if (stream != stream->context->legacy) return nullptr;
  for (Capture* capture : captures) {
    const bool relaxed = capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!relaxed && capture->origin->blocking() && capture->origin->context == stream->context) return capture;
  }
  return nullptr;
}

CUresult begin(CUstream stream, CUgraph graph, const CUgraphNode* after, size_t count, CUstreamCaptureMode mode) {
  static uint64_t ids = 0;
  if (stream == stream->context->legacy) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  if (stream->capture != nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  stream->capture = new Capture{++ids, mode, thread_id(), stream, graph != nullptr ? graph : new CUgraph_st, false, {stream}};
  stream->capture_after.clear();
  if (count != 0) stream->capture_after.assign(after, after + count);
  captures.push_back(stream->capture);
  ++captures_now;
  ++totals().captures;
  return CUDA_SUCCESS;
}

void add_ancestors(CUgraphNode node, std::set<CUgraphNode>& found) {
  if (!found.insert(node).second) return;
  for (CUgraphNode before : node->after) add_ancestors(before, found);
}

bool all_joined(const Capture& capture) {
  std::set<CUgraphNode> joined;
  for (CUgraphNode node : capture.origin->capture_after) add_ancestors(node, joined);
  for (CUstream stream : capture.streams) {
    for (CUgraphNode node : stream->capture_after) {
      if (node->to_join && joined.count(node) == 0) return false;
    }
  }
  return true;
}

// Its streams are free again, and no call minds it any more.
void forget(Capture& capture) {
  for (CUstream stream : capture.streams) {
    stream->capture = nullptr;
    stream->capture_after.clear();
  }
  captures.erase(std::find(captures.begin(), captures.end(), &capture));
  --captures_now;
}

CUresult end(CUstream stream, CUgraph* out) {
  *out = nullptr;
  const std::unique_ptr<Capture> capture(stream->capture);
  if (capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
  CUresult result = CUDA_SUCCESS;
  if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != thread_id()) {
    result = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
  } else if (capture->invalid) {
    result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  } else if (!all_joined(*capture)) {
    result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
  }
  forget(*capture);
  if (result == CUDA_SUCCESS) {
    *out = capture->graph;
    ++totals().captures_ended;
  }
  return result;
}

CUresult status_of(CUstream stream, CUstreamCaptureStatus* out, const char* function) {
  *out = stream->capture == nullptr ? CU_STREAM_CAPTURE_STATUS_NONE
         : stream->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                    : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  Capture* const minding = minds_legacy(stream);
  if (minding == nullptr) return CUDA_SUCCESS;
  invalidate(*minding, function);
  return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

}  // namespace

namespace played {

CUresult unsafe(const char* function) {
  if (captures_now.load() == 0 || mode_here == CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_SUCCESS;
  const Guard guard(lock());
  CUresult result = CUDA_SUCCESS;
  for (Capture* capture : captures) {
    if (!forbids(*capture)) continue;
    invalidate(*capture, function);
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

CUresult put_locked(CUstream stream, Work work) {
  if (Capture* const capture = stream->capture) {
    if (capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    auto node = std::make_unique<CUgraphNode_st>(CUgraphNode_st{capture->graph, std::move(work), stream->capture_after, true});
    stream->capture_after = {node.get()};
    capture->graph->nodes.push_back(std::move(node));
    return CUDA_SUCCESS;
  }
  if (Capture* const minding = minds_legacy(stream)) {
    invalidate(*minding, "the legacy stream");
    return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  }
  if (work.type == CU_GRAPH_NODE_TYPE_KERNEL) note_kernel(work.name);
  enqueue(stream, std::move(work));
  return CUDA_SUCCESS;
}

CUresult join_capture(CUstream stream, CUevent event) {
  const auto into = std::find_if(captures.begin(), captures.end(), [&](Capture* capture) { return capture->id == event->capture; });
  if (into == captures.end()) return CUDA_ERROR_CAPTURED_EVENT;  // its capture is over
  if ((*into)->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (stream->capture == nullptr) {
    stream->capture = *into;
    stream->capture_after.clear();
    (*into)->streams.insert(stream);
  }
  if (stream->capture != *into) return CUDA_ERROR_STREAM_CAPTURE_MERGE;
  auto& after = stream->capture_after;
  for (CUgraphNode node : event->capture_after) {
    if (std::find(after.begin(), after.end(), node) == after.end()) after.push_back(node);
  }
  return CUDA_SUCCESS;
}

CUresult broken_by(CUstream stream, const char* function) {
  if (stream->capture == nullptr) return CUDA_SUCCESS;
  invalidate(*stream->capture, function);
  return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

// A stream that only takes part may go, and NCCL's do. With its origin, the capture goes.
void leave_capture(CUstream stream) {
  Capture* const capture = stream->capture;
  if (capture == nullptr) return;
  if (capture->origin != stream) {
    capture->streams.erase(stream);
    return;
  }
  forget(*capture);
  delete capture;
}

}  // namespace played

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  return play(__func__, [&] { return with_stream(handle, [&](CUstream stream) { return begin(stream, nullptr, nullptr, 0, mode); }); });
}

CUresult cuStreamBeginCaptureToGraph(CUstream handle, CUgraph graph, const CUgraphNode* after, const CUgraphEdgeData*, size_t count,
                                     CUstreamCaptureMode mode) {
  return play(__func__, [&] { return with_stream(handle, [&](CUstream stream) { return begin(stream, graph, after, count, mode); }); });
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* out) {
  return play(__func__, [&] {
    return with_stream(handle, [&](CUstream stream) {
      const bool elsewhere = stream->capture != nullptr && stream->capture->origin != stream;
      return elsewhere ? CUDA_ERROR_STREAM_CAPTURE_UNMATCHED : end(stream, out);
    });
  });
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* out) {
  const char* const me = __func__;
  return play(me, [&] { return with_stream(handle, [&](CUstream stream) { return status_of(stream, out, me); }); });
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                   const CUgraphNode** after, const CUgraphEdgeData** edges, size_t* count) {
  const char* const me = __func__;
  return play(me, [&] {
    return with_stream(handle, [&](CUstream stream) {
      const CUresult result = status_of(stream, status, me);
      if (result != CUDA_SUCCESS || *status != CU_STREAM_CAPTURE_STATUS_ACTIVE) return result;
      if (id != nullptr) *id = stream->capture->id;
      if (graph != nullptr) *graph = stream->capture->graph;
      if (after != nullptr) *after = stream->capture_after.data();
      if (edges != nullptr) *edges = nullptr;
      if (count != nullptr) *count = stream->capture_after.size();
      return CUDA_SUCCESS;
    });
  });
}

CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id, CUgraph* graph,
                                   const CUgraphNode** after, size_t* count) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, graph, after, nullptr, count);
}

CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id) {
  return cuStreamGetCaptureInfo_v3(stream, status, id, nullptr, nullptr, nullptr, nullptr);
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode* nodes, const CUgraphEdgeData*, size_t count, unsigned flags) {
  return play(__func__, [&] {
    return with_stream(handle, [&](CUstream stream) {
      if (stream->capture == nullptr) return CUDA_ERROR_ILLEGAL_STATE;
      auto& after = stream->capture_after;
      if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) {
        for (CUgraphNode node : after) node->to_join = false;  // documented: what is set aside need not be joined
        after.clear();
      }
      if (count != 0) after.insert(after.end(), nodes, nodes + count);
      return CUDA_SUCCESS;
    });
  });
}

CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode* nodes, size_t count, unsigned flags) {
  return cuStreamUpdateCaptureDependencies_v2(stream, nodes, nullptr, count, flags);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return counted(__func__, [&] {
    std::swap(*mode, mode_here);
    return CUDA_SUCCESS;
  });
}
