// How long the training thread was idle while communication was in flight (collectors/commwatch/probe/exposure.py defines it).
//
// With f(t) = wall time - CPU time of that thread, each period with something in flight counts f(end) - f(begin). So a
// begin subtracts f and an end adds it; the order of additions does not matter, and no thread waits for another.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstdint>

namespace commwatch {

inline uint64_t clock_ns(clockid_t clock) {
  timespec time;
  if (clock_gettime(clock, &time) != 0) return 0;
  return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

inline uint64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }

class Exposure {
 public:
  static constexpr int64_t kUnknown = -1;

  // clock: CPU clock of the training thread.
  Exposure(clockid_t clock, uint64_t now) : clock_(clock), taken_at_(now) {}

  // Make the thread with this CPU clock the training thread. Called in the same thread as `take`.
  void watch(clockid_t clock) {
    if (clock_.exchange(clock) != clock) fresh_ = true;
  }

  // An operation ran on a device (CUDA), so CPU time does not show exposure.
  void not_known() { known_.store(false, std::memory_order_relaxed); }
  bool on_device() const { return !known_.load(std::memory_order_relaxed); }

  void begin(uint64_t now) {
    entered_.fetch_add(1);
    if (in_flight_.fetch_add(1) == 0) sum_.fetch_sub(wall_minus_cpu(now));
    left_.fetch_add(1);
  }

  void end(uint64_t now) {
    entered_.fetch_add(1);
    if (in_flight_.fetch_sub(1) == 1) sum_.fetch_add(wall_minus_cpu(now));
    left_.fetch_add(1);
  }

  // An operation was over when its call returned: the caller was blocked in it.
  void in_call(uint64_t began, uint64_t ended) {
    if (in_flight_.load() == 0) sum_.fetch_add(static_cast<int64_t>(ended - began));
  }

  // Returns the exposed ns since the last call, including a running period up to now. Called by one thread, once per step.
  int64_t take(uint64_t now) {
    int64_t sum = 0;
    const bool seen = look(now, &sum);
    const int64_t exposed = sum - taken_;
    const int64_t since = static_cast<int64_t>(now - taken_at_);
    const bool comparable = seen && !fresh_;
    taken_ = sum;
    taken_at_ = now;
    fresh_ = !seen;
    // The clocks are read one after the other: small deviations are rounding, larger ones come from a period over two threads.
    const bool sane = exposed >= -kSlack && exposed <= since + kSlack;
    if (!comparable || !sane || !known_.load(std::memory_order_relaxed)) return kUnknown;
    return exposed > 0 ? exposed : 0;
  }

 private:
  static constexpr int64_t kSlack = 1000000;
  static constexpr int kTries = 1000;

  int64_t wall_minus_cpu(uint64_t now) const {
    return static_cast<int64_t>(now) - static_cast<int64_t>(clock_ns(clock_.load(std::memory_order_relaxed)));
  }

  // Reads the sum at a moment when no thread has counted itself but not yet added its time.
  bool look(uint64_t now, int64_t* sum) {
    for (int i = 0; i < kTries; ++i) {
      const uint64_t left = left_.load();
      *sum = sum_.load() + (in_flight_.load() > 0 ? wall_minus_cpu(now) : 0);
      if (entered_.load() == left) return true;
      sched_yield();
    }
    return false;
  }

  std::atomic<uint64_t> entered_{0};
  std::atomic<uint64_t> left_{0};
  std::atomic<int64_t> in_flight_{0};
  std::atomic<int64_t> sum_{0};
  std::atomic<clockid_t> clock_;
  std::atomic<bool> known_{true};
  int64_t taken_ = 0;
  uint64_t taken_at_;
  bool fresh_ = false;  // the last sum cannot be compared with the next one
};

}  // namespace commwatch
