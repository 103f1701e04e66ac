// Operations of CUDA graphs: a captured operation runs at each replay of its graph, without a call of the dispatcher. Does not depend
// on torch.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ring.h"

namespace commwatch {

// An operation of a graph: its group, and its record without a number and times.
struct Captured {
  const void* group;
  std::string name;
  bool p2p;
  Record record;
  uint64_t nccl_call = 0;  // within which it was captured; 0: there is no plugin
  uint64_t replays = 0;
};

// The operations of each graph, by the numbers that torch_graphs.py gives to graphs.
class Graphs {
 public:
  // A capture begins in this thread. An earlier capture in this thread that has not ended was aborted.
  void begin(uint64_t graph) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const pthread_t me = pthread_self();
    end_if([me](const Capture& capture) { return pthread_equal(capture.thread, me) != 0; });
    captures_.push_back(Capture{graph, me});
    operations_[graph].clear();
    live_.store(captures_.size());
  }

  void end(uint64_t graph) {
    const std::lock_guard<std::mutex> lock(mutex_);
    end_if([graph](const Capture& capture) { return capture.graph == graph; });
  }

  // Drop the operations of a graph that was destroyed.
  void forget(uint64_t graph) {
    const std::lock_guard<std::mutex> lock(mutex_);
    operations_.erase(graph);
  }

  // Whether a capture is running, in any thread.
  bool capturing() const { return live_.load(std::memory_order_relaxed) != 0; }

  // Add an operation, called in any thread, to the graph that is being captured. Returns false if that graph is not known:
  // several captures are running, and none has begun in this thread.
  bool add(Captured operation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const pthread_t me = pthread_self();
    const auto mine = std::find_if(captures_.begin(), captures_.end(),
                                   [me](const Capture& capture) { return pthread_equal(capture.thread, me) != 0; });
    if (mine == captures_.end() && captures_.size() != 1) return false;
    operations_[mine != captures_.end() ? mine->graph : captures_.front().graph].push_back(std::move(operation));
    return true;
  }

  // Count a replay of each operation of a graph, and call `replay` with it, in the order of their capture.
  template <class Replay>
  void each(uint64_t graph, Replay replay) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = operations_.find(graph);
    if (found == operations_.end()) return;
    for (Captured& operation : found->second) {
      ++operation.replays;
      replay(std::as_const(operation));
    }
  }

 private:
  struct Capture {
    uint64_t graph;
    pthread_t thread;
  };

  template <class Which>
  void end_if(Which which) {
    captures_.erase(std::remove_if(captures_.begin(), captures_.end(), which), captures_.end());
    live_.store(captures_.size());
  }

  std::mutex mutex_;
  std::vector<Capture> captures_;
  std::map<uint64_t, std::vector<Captured>> operations_;
  std::atomic<size_t> live_{0};
};

}  // namespace commwatch
