// NCCL's own times of operations, from our profiler plugin (collectors/commwatch/nccl_plugin), which NCCL has loaded in this process.
#pragma once

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <type_traits>

#include "commwatch_nccl.h"

namespace commwatch {

class NcclPlugin {
 public:
  // Use the plugin in this file from now on: NCCL, which opens the same file, then has the same plugin. Returns false if there is none.
  static bool use(const char* path, const commwatch_nccl_sink* sink) {
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    const auto look = [library](const char* name, auto** function) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
      return *function != nullptr;
    };
    decltype(&commwatch_nccl_sink_to) to = nullptr;
    static Functions functions;
    if (!look("commwatch_nccl_here", &functions.here) || !look("commwatch_nccl_times_of", &functions.times) ||
        !look("commwatch_nccl_lost", &functions.lost) || !look("commwatch_nccl_sink_to", &to)) {
      return false;
    }
    to(sink);
    used().store(&functions, std::memory_order_release);
    return true;
  }

  // Ask for no more times.
  static void leave() { left().store(true); }

  static commwatch_nccl_state times(uint64_t call, commwatch_nccl_times* times) {
    const Functions* const functions = call != 0 && !left().load(std::memory_order_relaxed) ? used().load(std::memory_order_acquire) : nullptr;
    return functions != nullptr ? functions->times(call, times) : kCallUnknown;
  }

  // Operations of other libraries that were not recorded, in this process so far.
  static uint64_t lost() {
    const Functions* const functions = used().load(std::memory_order_acquire);
    return functions != nullptr ? functions->lost() : 0;
  }

  // A call of c10d in this thread: what NCCL is asked for meanwhile belongs to it.
  class Call {
   public:
    Call() {
      const Functions* const functions = used().load(std::memory_order_acquire);
      if (functions == nullptr) return;
      static std::atomic<uint64_t> numbers{0};
      static thread_local commwatch_nccl_thread* const of_thread = functions->here();
      here_ = of_thread;
      before_ = here_->call;
      here_->call = number_ = numbers.fetch_add(1, std::memory_order_relaxed) + 1;
    }
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;
    ~Call() {
      if (here_ != nullptr) here_->call = before_;
    }

    // It begins now.
    void begins(uint64_t now) const {
      if (here_ != nullptr) here_->launch_ns = now;
    }

    // 0: there is no plugin.
    uint64_t number() const { return number_; }

   private:
    commwatch_nccl_thread* here_ = nullptr;
    uint64_t before_ = 0, number_ = 0;
  };

 private:
  struct Functions {
    decltype(&commwatch_nccl_here) here;
    decltype(&commwatch_nccl_times_of) times;
    decltype(&commwatch_nccl_lost) lost;
  };
  static std::atomic<bool>& left() {
    static std::atomic<bool> told{false};
    return told;
  }
  static std::atomic<const Functions*>& used() {
    static std::atomic<const Functions*> functions{nullptr};
    return functions;
  }
};

}  // namespace commwatch
