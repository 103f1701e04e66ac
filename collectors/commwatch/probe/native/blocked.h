// How long threads of this process have been blocked in waits for operations. Waits of several threads at a time count once.
#pragma once

#include <atomic>
#include <cstdint>

namespace commwatch {

class Blocked {
 public:
  // Returns whether this wait counts: no other thread waits.
  bool begin(uint64_t now) {
    uint64_t none = 0;
    return since_.compare_exchange_strong(none, now);
  }

  // A wait that counts is over.
  void end(uint64_t now) {
    const uint64_t since = since_.exchange(0);
    if (now > since) sum_.fetch_add(now - since);
  }

  // Up to now, in ns, with a running wait.
  uint64_t until(uint64_t now) const {
    const uint64_t sum = sum_.load(), since = since_.load();
    return since != 0 && since < now ? sum + (now - since) : sum;
  }

 private:
  std::atomic<uint64_t> sum_{0};
  std::atomic<uint64_t> since_{0};
};

}  // namespace commwatch
