// What NCCL's kernels count for its profiler: works begun and ended on each channel, with the device's time.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "settings.h"

namespace played {

// The counters of a communicator, in the host's memory, where a thread of NCCL's reads them.
class Counters {
 public:
  // comm: what its kernels are given. Null if the counters are not found.
  static std::shared_ptr<Counters> of(const void* comm);

  // The works of a kernel, by channel, as its arguments say.
  using Works = std::vector<std::pair<int, int>>;
  static Works works(const void* args);

  // The works begin; returns the number of the first on each channel, which `end` is given.
  std::vector<uint64_t> begin(const Works& works, Ns at);
  // The last channel ends at `last`, the others PLAYED_NCCL_APART_US earlier.
  void end(const Works& works, const std::vector<uint64_t>& first, Ns last);

 private:
  static constexpr int kChannels = 64, kKept = 64;
  struct Channel {
    struct {
      uint64_t counter, time;
    } works[kKept];
  };

  Counters(Channel* begun, Channel* ended) : begun_(begun), ended_(ended) {}

  Channel *const begun_, *const ended_;
  uint64_t count_[kChannels] = {};
};

// The device's clock: another zero than the host's, and 20 ppm faster.
inline uint64_t device_time(Ns at) { return 1700000000000000000u + static_cast<uint64_t>(at) + static_cast<uint64_t>(at) / 50000; }

}  // namespace played
