// The groups of a process, with their counters. Does not depend on torch.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ring.h"

namespace commwatch {

// A map for a few keys that only grows: neither reading nor adding takes a lock.
template <class Key, class Value>
class Few {
 public:
  ~Few() {
    for (Node* node = first_.load(); node != nullptr;) delete std::exchange(node, node->next);
  }

  Value& operator[](const Key& key) {
    Node* const seen = first_.load(std::memory_order_acquire);
    if (Node* found = find(seen, nullptr, key)) return found->value;
    auto added = std::make_unique<Node>(key, seen);
    Node* checked = seen;
    while (!first_.compare_exchange_weak(added->next, added.get())) {
      if (Node* found = find(added->next, checked, key)) return found->value;  // another thread added it first
      checked = added->next;
    }
    return added.release()->value;
  }

  template <class Do>
  void each(Do what) {
    for (Node* node = first_.load(std::memory_order_acquire); node != nullptr; node = node->next) what(node->key, node->value);
  }

 private:
  struct Node {
    Node(const Key& k, Node* n) : key(k), next(n) {}
    const Key key;
    Value value{};
    Node* next;
  };

  static Node* find(Node* from, const Node* until, const Key& key) {
    for (Node* node = from; node != until; node = node->next) {
      if (node->key == key) return node;
    }
    return nullptr;
  }

  std::atomic<Node*> first_{nullptr};
};

// Operations of one queue run one after another: a group's collectives, and its sends or recvs with one peer.
struct Queue {
  std::atomic<uint64_t> last_end_ns{0};
  // The latest operation was only counted, so the begin of the next one is unknown.
  std::atomic<bool> skipped{false};
  // A bit for each device on which it has had an operation, and on which it has had a message in a batch.
  std::atomic<uint64_t> devices{0}, batch_devices{0};

  // An operation begins on this device. Returns whether it is the first of this queue there. Messages in a batch have another communicator
  // than those outside of one.
  bool first_on(int device, bool message_in_batch) {
    std::atomic<uint64_t>& seen = message_in_batch ? batch_devices : devices;
    const uint64_t bit = uint64_t{1} << (device % 64);
    return (seen.load(std::memory_order_relaxed) & bit) == 0 && (seen.fetch_or(bit) & bit) == 0;
  }

  // An operation ended at `end_ns`. Returns when the previous one ended, or 0.
  uint64_t ended(uint64_t end_ns) {
    uint64_t previous = last_end_ns.load(std::memory_order_relaxed);
    while (end_ns > previous && !last_end_ns.compare_exchange_weak(previous, end_ns, std::memory_order_relaxed)) {
    }
    return previous;
  }
};

struct PeerKey {
  uint8_t op;
  int32_t peer;
  bool operator==(const PeerKey& other) const { return op == other.op && peer == other.peer; }
};

// Numbers sends to, or receives from, one peer by tag. A tag replaces an earlier one that is equal modulo kTags, and begins at 0:
// memory and time stay bounded for programs that use a new tag each time, and both sides forget the same tags.
class TagNumbers {
 public:
  uint32_t next(int32_t tag) {
    const uint64_t key = static_cast<uint32_t>(tag);
    std::atomic<uint64_t>& place = places_[key % format::kTags];
    uint64_t seen = place.load(std::memory_order_relaxed);
    uint32_t number;
    do {
      number = seen >> 32 == key ? static_cast<uint32_t>(seen) : 0;
    } while (!place.compare_exchange_weak(seen, key << 32 | (number + 1), std::memory_order_relaxed));
    return number;
  }

 private:
  // Each entry: a tag and the number of its next operation. An unused entry has tag 0 and number 0.
  std::array<std::atomic<uint64_t>, format::kTags> places_{};
};

struct Peer : Queue {
  TagNumbers numbers;
};

// A counter's key: operations of one kind and size class, S <= 2**size_log2 (-1: no size).
struct CountKey {
  uint8_t op;
  int8_t size_log2;
  uint8_t flags;
  bool operator==(const CountKey& other) const { return op == other.op && size_log2 == other.size_log2 && flags == other.flags; }
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
    Counted& counted = counts[CountKey{record.op, static_cast<int8_t>(log2), flags}];
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
  Few<PeerKey, Peer> peers;
  Few<CountKey, Counted> counts;
  std::atomic<Group*> next{nullptr};
};

}  // namespace commwatch
