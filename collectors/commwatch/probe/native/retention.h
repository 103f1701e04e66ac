// Bounds the memory that exists only because the ends of operations on devices are watched.
//
// A Work of NCCL's holds the outputs of its operation. The host may be far ahead of the device, and the user may have dropped the
// Work and its outputs. Without us the allocator would reuse their memory at once, in the order of the stream. Does not depend on torch.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "format.h"

namespace commwatch {

// An operation that is watched until it ends.
class Watch {
 public:
  virtual ~Watch() = default;
  // Bytes that exist only because of this.
  virtual uint64_t kept_bytes() const = 0;
  // Free them; the end of the operation will not be seen.
  virtual void let_go() = 0;
};

// Used only by the poller's thread.
class Retention {
 public:
  // Most bytes that are kept.
  static constexpr uint64_t kMostBytes = format::kMostKept;

  // Returns whether the caller has to add `check` to the poller.
  bool add(std::weak_ptr<Watch> watch) {
    watches_.push_back(std::move(watch));
    return !std::exchange(checked_, true);
  }

  // Lets the oldest watches go if too much is kept. Returns true once nothing is watched.
  bool check(uint64_t now) {
    if (now - last_ns_ < kEveryNs) return false;
    last_ns_ = now;
    std::vector<std::pair<std::shared_ptr<Watch>, uint64_t>> keep;
    uint64_t kept = 0;
    const auto over = [&](const std::weak_ptr<Watch>& known) {
      auto watch = known.lock();
      if (!watch) return true;
      const uint64_t bytes = watch->kept_bytes();
      kept += bytes;
      if (bytes != 0) keep.emplace_back(std::move(watch), bytes);
      return false;
    };
    watches_.erase(std::remove_if(watches_.begin(), watches_.end(), over), watches_.end());
    for (auto& [watch, bytes] : keep) {
      if (kept <= kMostBytes) break;
      watch->let_go();
      kept -= bytes;
    }
    checked_ = !watches_.empty();
    return !checked_;
  }

 private:
  static constexpr uint64_t kEveryNs = 5'000'000;

  std::vector<std::weak_ptr<Watch>> watches_;  // oldest first
  bool checked_ = false;
  uint64_t last_ns_ = 0;
};

}  // namespace commwatch
