// Decides how much is recorded, from what that costs (collectors/commwatch/probe/governor.py defines it). Pure.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "format.h"

namespace commwatch {

// Whether the operation with this number is recorded in mode `sampling`.
inline bool is_sampled(uint32_t seq) { return ((seq >> format::kRunBits) * format::kSpread) >> (32 - format::kSampleBits) == 0; }

// Chooses the operations of one thread whose bookkeeping is measured (collectors/commwatch/probe/governor.py explains why at random).
class CostTurns {
 public:
  // Returns how many operations this one represents when measured; mostly 0.
  uint32_t next(uint64_t now_ns) {
    ++operations_;
    if (ahead_ < 0) {
      if (latest_ns_ == 0) latest_ns_ = now_ns;
      if (operations_ < format::kCostSample && now_ns - latest_ns_ < format::kCostNs) return 0;
      state_ = state_ * 1664525u + 1013904223u;
      ahead_ = static_cast<int64_t>((uint64_t{state_} * operations_) >> 32);
    }
    if (--ahead_ >= 0) return 0;
    latest_ns_ = now_ns;
    return std::exchange(operations_, 0);
  }

 private:
  uint32_t operations_ = 0, state_ = 1;
  uint64_t latest_ns_ = 0;
  int64_t ahead_ = -1;
};

// Limits measurements of one thread by the usual ones: the kernel may preempt the thread during a measurement.
class UsualCost {
 public:
  uint64_t bound(uint64_t took_ns) {
    latest_[number_++ % kRemembered] = took_ns;
    std::array<uint64_t, kRemembered> known = latest_;
    const size_t length = std::min(number_, kRemembered), usual = length > format::kCostRare ? length - 1 - format::kCostRare : 0;
    std::nth_element(known.begin(), known.begin() + usual, known.begin() + length);
    return std::min(took_ns, format::kCostBound * known[usual]);
  }

 private:
  static constexpr size_t kRemembered = format::kCostRemembered;
  std::array<uint64_t, kRemembered> latest_{};
  size_t number_ = 0;
};

class Governor {
 public:
  // budget: fraction of the time that the probe may take; 0: unlimited.
  explicit Governor(double budget) : budget_(budget) {}

  // Whether a window of this length, with so many measurements, is over.
  static bool is_over(uint64_t elapsed_ns, uint64_t measured) {
    return elapsed_ns >= (measured > 0 && measured < format::kEnough ? format::kLongestNs : format::kLookNs);
  }

  // Returns the mode from now on, after a window in which the probe took this fraction of the time.
  format::Mode window(double share) {
    const int mode = static_cast<int>(mode_);
    if (budget_ > 0 && share > budget_) {
      within_ = 0;
      if (++above_ >= format::kPatience && mode_ != format::Mode::kCounters) {
        mode_ = static_cast<format::Mode>(mode + 1);
        above_ = 0;
        trial_ = std::min(2 * trial_, format::kLastTrial);
      }
      return mode_;
    }
    above_ = 0;
    if (++within_ >= trial_) {
      if (mode_ == format::Mode::kFull) {
        trial_ = format::kFirstTrial / 2;  // the trial succeeded
      } else {
        mode_ = static_cast<format::Mode>(mode - 1);
        within_ = 0;
      }
    }
    return mode_;
  }

 private:
  const double budget_;
  format::Mode mode_ = format::Mode::kFull;
  int above_ = 0, within_ = 0;
  int trial_ = format::kFirstTrial / 2;
};

}  // namespace commwatch
