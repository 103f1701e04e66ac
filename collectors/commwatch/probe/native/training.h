// Which thread trains, and which operations therefore do not hold up the training. Does not depend on torch.
#pragma once

#include <atomic>

namespace commwatch {

class Training {
 public:
  // This thread marks a step.
  void here() { thread_.store(this_thread(), std::memory_order_relaxed); }

  // This thread launches an operation. Returns whether it is not the one that trains. That is not known before the first mark, and where the thread
  // that marks steps launches none, nor any on a device: then another one may do so for it.
  bool is_elsewhere(bool on_device) {
    const void* const thread = thread_.load(std::memory_order_relaxed);
    if (thread == nullptr) return false;
    if (thread != this_thread() && !on_device) return communicates_.load(std::memory_order_relaxed);
    if (!communicates_.load(std::memory_order_relaxed)) communicates_.store(true, std::memory_order_relaxed);
    return false;
  }

 private:
  static const void* this_thread() {
    static thread_local char here;
    return &here;
  }

  std::atomic<const void*> thread_{nullptr};
  std::atomic<bool> communicates_{false};
};

}  // namespace commwatch
