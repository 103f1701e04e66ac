// The groups of a process, with their counters. Does not depend on torch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "maps.h"
#include "messages.h"
#include "ring.h"

namespace commwatch {

// A counter's key: operations of one kind and size class, S <= 2**size_log2 (-1: no size).
struct CountKey {
  uint8_t op;
  int8_t size_log2;
  uint8_t flags;
  bool operator==(const CountKey& other) const { return op == other.op && size_log2 == other.size_log2 && flags == other.flags; }
  uint64_t bits() const { return uint64_t{static_cast<uint8_t>(size_log2)} << 16 | uint64_t{op} << 8 | flags; }
};

// Number of operations and their bytes in one word, so that both are read together. Room for a million operations and 17 TB a second.
struct Counted {
  static constexpr int kBytesBits = 44;
  static constexpr uint64_t kBytes = (uint64_t{1} << kBytesBits) - 1;
  std::atomic<uint64_t> sums{0};
  std::atomic<uint32_t> seq{0};
  std::atomic<uint64_t> launch_ns{0};
};

struct Group {
  Group(const void* a, std::string n) : address(a), name(std::move(n)) {}

  // Count an operation that gets no record of its own.
  void count(const Record& record, bool p2p) {
    const uint64_t size = std::min(record.size_bytes, Counted::kBytes);
    const int log2 = size > 1 ? 64 - __builtin_clzll(size - 1) : static_cast<int>(size) - 1;
    const auto flags = static_cast<uint8_t>(record.flags & (format::kNoSize | format::kUnaligned));
    const CountKey key{record.op, static_cast<int8_t>(log2), flags};
    Counted& counted = counts.part(key, kKinds)[key];
    if (!p2p) counted.seq.store(record.seq, std::memory_order_relaxed);
    counted.launch_ns.store(record.launch_ns, std::memory_order_relaxed);
    counted.sums.fetch_add((uint64_t{1} << Counted::kBytesBits) + size, std::memory_order_release);
  }

  // Write what has been counted since the last call.
  void write_counts(Ring& ring, uint64_t now) {
    counts.each([&](const CountKey& key, Counted& counted) {
      const uint64_t sums = counted.sums.exchange(0, std::memory_order_acquire);
      if (sums == 0) return;
      Record record;
      record.op = key.op;
      record.group = small_id;
      record.size_bytes = sums & Counted::kBytes;
      record.launch_ns = record.start_ns = counted.launch_ns.load(std::memory_order_relaxed);
      record.seq = counted.seq.load(std::memory_order_relaxed);
      record.waited_us = static_cast<uint32_t>(sums >> Counted::kBytesBits);
      record.end_ns = std::max(now, record.start_ns);
      record.flags = key.flags | format::kUntimed;
      record.timing = format::kCounted;
      ring.write(record);
    });
  }

  int32_t global_rank(int64_t group_rank) const {
    return group_rank >= 0 && group_rank < static_cast<int64_t>(ranks.size()) ? ranks[group_rank] : -1;
  }

  // About how many kinds of operations and size classes a group has.
  static constexpr size_t kKinds = 128;

  // Address of the process group. A later group may have the same, so the name is part of the key.
  const void* const address;
  const std::string name;
  int size = 0;
  uint16_t small_id = format::kNoGroup;
  bool aligned = false;
  std::vector<int32_t> ranks;
  std::atomic<uint32_t> next_seq{0};
  // Whether its backend has been asked to time operations on devices.
  std::atomic<bool> times_asked{false};
  // Whether its backend cannot do that.
  std::atomic<bool> without_times{false};
  // Whether its Works have been seen to know when the device reaches an operation.
  std::atomic<bool> knows_starts{false};
  // Whether its blocking collectives on devices run on the current stream, though they have a Work.
  std::atomic<bool> blocks_here{false};
  Queue collectives;
  // The event after its latest blocking operation on a device (a c10::Event). Exchanged by std::atomic_exchange.
  std::shared_ptr<void> latest_over;
  Peers peers;
  // Messages whose peer is not known, or has no room in `peers`, by operation.
  Few<uint8_t, Peer> without_peer;
  Many<CountKey, Counted> counts;
  std::atomic<Group*> next{nullptr};
};

}  // namespace commwatch
