// What the driver's handles point to: contexts, streams, events, graphs; and the functions that the files share about them.
#pragma once

#include <map>
#include <set>

#include "engine.h"
#include "report.h"

namespace played {

// A capture that is under way.
struct Capture {
  uint64_t id;
  CUstreamCaptureMode mode;
  int thread;
  CUstream origin;
  CUgraph graph;
  bool invalid = false;
  std::set<CUstream> streams;
};

}  // namespace played

struct CUctx_st {
  int device = 0;
  int retained = 0;
  unsigned flags = 0;
  CUstream legacy = nullptr;       // the default stream
  std::set<CUstream> blocking;     // the others that it waits for, and that wait for it
  std::map<void*, void*> storage;  // of the runtime's, see export_tables.cpp
};

struct CUstream_st {
  CUcontext context;
  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;
  played::OpRef last;
  played::Capture* capture = nullptr;
  std::vector<CUgraphNode> capture_after;  // what a captured piece of work comes after
  bool blocking() const { return (flags & CU_STREAM_NON_BLOCKING) == 0; }
};

struct CUevent_st {
  CUcontext context;
  unsigned flags = 0;
  // What it comes after, and when it was recorded: its moment is the later one of that time and the end of `op`. Null: never recorded.
  played::OpRef op;
  played::Ns recorded = 0;
  uint64_t capture = 0;  // id of the capture in which it was last recorded; 0: none
  std::vector<CUgraphNode> capture_after;
  bool destroyed = false;  // its memory is kept, so that a later use of the handle is an error
  bool timed() const { return (flags & CU_EVENT_DISABLE_TIMING) == 0; }
};

struct CUgraphNode_st {
  CUgraph graph;
  played::Work work;
  std::vector<CUgraphNode> after;
  bool to_join = false;  // its capture may not end without it
};

struct CUgraph_st {
  std::vector<std::unique_ptr<CUgraphNode_st>> nodes;
  std::map<CUuserObject, int> kept;
  ~CUgraph_st();
};

namespace played {

// -- contexts and devices; without the lock

CUcontext current();
CUcontext primary(int device);
int current_device();  // -1: no context is current
int device_count();
int bus_of(int device);

// -- streams

CUstream stream_of(CUstream handle);  // null, legacy and per thread: the real one. Returns null for an unknown handle
std::vector<CUstream> streams_of(CUcontext context);
inline bool exists(CUevent event) { return event != nullptr && !event->destroyed; }
// What work comes after that is put on this stream now, if it is one piece and the stream is not empty.
OpRef last_of(CUstream stream);
OpRef enqueue(CUstream stream, Work work, std::vector<OpRef> after = {});

// Run `body` with the stream of a handle, and with the lock.
template <class Body>
CUresult with_stream(CUstream handle, Body body) {
  const Guard guard(lock());
  CUstream stream = stream_of(handle);
  if (stream == nullptr) return current() == nullptr ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_HANDLE;
  return body(stream);
}

// Put work on a stream, or into the graph that the stream is captured into. `put` takes the lock, `put_locked` needs it.
CUresult put(CUstream handle, Work work);
CUresult put_locked(CUstream stream, Work work);

void wait_for_all(CUcontext context);  // without the lock

// -- captures

CUresult join_capture(CUstream stream, CUevent event);      // waiting for an event of a capture means to take part in it
CUresult broken_by(CUstream stream, const char* function);  // a question to a stream that is captured breaks the capture
void leave_capture(CUstream stream);                        // it is about to be destroyed

}  // namespace played
