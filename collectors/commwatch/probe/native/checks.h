// Which collectives are checked, and the checksum of their data. Does not depend on torch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "format.h"

namespace commwatch {

// Two sums of the 64-bit words of a tensor, modulo 2**64, as in torch_checksums.py: of the words, and of words times positions.
struct Sums {
  uint64_t plain = 0;
  uint64_t weighted = 0;

  void add(uint64_t word, uint64_t position) {
    plain += word;
    weighted += word * position;
  }
};

template <class Integer>
Integer read_at(const char* data) {
  Integer value;
  std::memcpy(&value, data, sizeof value);
  return value;
}

// element: size of an element in bytes. Elements after the last whole word count as words, with their sign.
inline Sums checksum(const char* data, size_t bytes, size_t element) {
  Sums sums;
  const size_t words = bytes / 8;
  for (size_t at = 0; at < words; ++at) sums.add(read_at<uint64_t>(data + 8 * at), at + 1);
  uint64_t position = words;
  for (const char *at = data + 8 * words, *end = data + bytes; at < end; at += element) {
    const int64_t value = element == 1 ? read_at<int8_t>(at) : element == 2 ? read_at<int16_t>(at) : read_at<int32_t>(at);
    sums.add(static_cast<uint64_t>(value), ++position);
  }
  return sums;
}

// The sums of slices that follow one another.
//
// lengths: of the slices, in units of so many bytes.
inline std::vector<Sums> checksums(const char* data, const std::vector<int64_t>& lengths, size_t unit, size_t element) {
  std::vector<Sums> sums;
  for (const int64_t length : lengths) {
    const size_t bytes = static_cast<size_t>(length) * unit;
    sums.push_back(checksum(data, bytes, element));
    data += bytes;
  }
  return sums;
}

// Chooses the operations that are checked. The interval is doubled while checks take more than their budget, as in torch_corruption.py.
//
// Each rank decides that alone. What it checks depends only on the number of the operation in its group and on the interval, and the operations of a
// long interval are among those of a short one.
class Checks {
 public:
  // every: one in so many operations is checked; budget: fraction of the time that checks may take, 0: unlimited.
  void begin(uint32_t every, double budget) {
    budget_ = budget;
    every_.store(every);
    interval_.store(every);
  }

  bool on() const { return interval_.load(std::memory_order_relaxed) != 0; }

  bool due(uint32_t seq) const {
    const uint64_t interval = interval_.load(std::memory_order_relaxed);
    return interval != 0 && uint64_t{mixed(seq)} * interval < kNumbers;
  }

  // Returns true once, at the first operation on a device while checks are on.
  bool refuses_devices() { return on() && !refused_.exchange(true, std::memory_order_relaxed); }

  void spent(uint64_t ns) { spent_ns_.fetch_add(ns, std::memory_order_relaxed); }

  // Called by one thread, about once a second.
  void govern(uint64_t now) {
    if (!on()) return;
    const uint64_t spent = spent_ns_.exchange(0), since = std::exchange(since_ns_, now);
    if (since == 0 || now <= since || budget_ == 0) return;
    const double share = static_cast<double>(spent) / static_cast<double>(now - since);
    const uint64_t interval = interval_.load(), least = every_.load();
    if (share > budget_) {
      interval_.store(std::min(2 * interval, std::max(kLongest, least)));
    } else if (share < kCheap * budget_) {
      interval_.store(std::max(interval / 2, least));
    }
  }

 private:
  // A permutation of the numbers that keeps 0 and no pattern: whatever the number of operations in a step, each of them has its turn.
  static uint32_t mixed(uint32_t number) {
    number = (number ^ (number >> 16)) * 0x7feb352dU;
    number = (number ^ (number >> 15)) * 0x846ca68bU;
    return number ^ (number >> 16);
  }

  static constexpr uint64_t kNumbers = uint64_t{1} << 32, kLongest = uint64_t{1} << 31;
  static constexpr double kCheap = 0.25;

  double budget_ = 0;
  std::atomic<uint64_t> every_{0}, interval_{0}, spent_ns_{0};
  std::atomic<bool> refused_{false};
  uint64_t since_ns_ = 0;
};

}  // namespace commwatch
