// What is counted: calls by function and thread, events, captures, kernels; and the frame of every played function.
#pragma once

#include <cuda.h>

#include <atomic>
#include <string>

#include "settings.h"

namespace played {

// How often a function was called, by thread.
class Calls {
 public:
  static Calls& of(const char* function);  // never destroyed
  std::atomic<uint64_t>& of_this_thread();
  std::string json() const;  // without its name; empty: never called

  const std::string function;

 private:
  explicit Calls(const char* name) : function(name) {}
  static constexpr int kThreads = 64;
  struct ByThread {
    std::atomic<int> thread{0};
    std::atomic<uint64_t> calls{0};
  };
  ByThread by_thread_[kThreads];
  std::atomic<uint64_t> of_others_{0};  // of further threads, only in the sum
};

struct Totals {
  std::atomic<int64_t> events_plain{0}, events_timed{0}, events_alive{0};
  std::atomic<int64_t> captures{0}, captures_ended{0}, captures_disturbed{0};
  std::atomic<int64_t> kernels{0}, graphs_launched{0};
};
Totals& totals();

// One kernel of NCCL's that is over.
struct NcclKernel {
  std::string kernel, ops;
  uint64_t comm;
  int rank, ranks, device;
  uint64_t first;  // number of its first collective in the communicator; the largest number: it has only messages
  uint64_t bytes;
  Ns queued, begin, end;
  bool aborted, replayed;
};

void note_nccl(NcclKernel kernel);
void note_kernel(const std::string& name);
void note_computed(Ns begin, Ns end);  // a kernel that is not NCCL's
void note_disturbed(const char* function);   // this call broke a capture
void note_missing(const std::string& what);  // this was asked for and is not played

bool ready();                          // this process has called cuInit, and is not a forked child of the one that has
CUresult unsafe(const char* function);  // an error while a capture forbids calls like this one; graphs.h

// Count a call and run it, unless the devices are lost. Each lambda has a type of its own, and so each function its own count.
template <class Body>
CUresult counted(const char* function, Body body) {
  static Calls& calls = Calls::of(function);
  static thread_local std::atomic<uint64_t>& mine = calls.of_this_thread();
  mine.fetch_add(1, std::memory_order_relaxed);
  if (settings().trace >= 2) trace(2, "%s", function);
  return is_lost() ? CUDA_ERROR_DEVICE_UNAVAILABLE : body();
}

// The same, for functions that need cuInit.
template <class Body>
CUresult play(const char* function, Body body) {
  return counted(function, [&] { return ready() ? body() : CUDA_ERROR_NOT_INITIALIZED; });
}

// The same, for functions that CUDA calls potentially unsafe: a capture may forbid them.
template <class Body>
CUresult play_unsafe(const char* function, Body body) {
  return play(function, [&] {
    const CUresult forbidden = unsafe(function);
    return forbidden != CUDA_SUCCESS ? forbidden : body();
  });
}

// The end of many a function.
template <class T, class V>
CUresult answer(T* out, V value) {
  *out = static_cast<T>(value);
  return CUDA_SUCCESS;
}

}  // namespace played

// Write the report now. Null: to the file of PLAYED_REPORT. Returns 0, or -1.
extern "C" int played_report(const char* path);
