// How much is recorded, by what that costs (collectors/governor.py says what it means). Pure.
#pragma once

#include <algorithm>
#include <cstdint>

#include "format.h"

namespace commwatch {

// Whether the operation with this number is recorded in `sampling`.
inline bool is_sampled(uint32_t seq) { return ((seq >> format::kRunBits) * format::kSpread) >> (32 - format::kSampleBits) == 0; }

class Governor {
 public:
  // budget: part of the time that the probe may take; 0: any.
  explicit Governor(double budget) : budget_(budget) {}

  // Whether a window is over that has lasted so long and brought so many measurements.
  static bool is_over(uint64_t elapsed_ns, uint64_t measured) {
    return elapsed_ns >= (measured > 0 && measured < format::kEnough ? format::kLongestNs : format::kLookNs);
  }

  // The mode from now on, after a window in which the probe took this part of the time.
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
        trial_ = format::kFirstTrial / 2;  // it has held
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
