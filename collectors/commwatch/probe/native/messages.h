// The queues of a group, among them those of its messages by peer. Does not depend on torch.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "format.h"
#include "maps.h"

namespace commwatch {

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
  uint64_t bits() const { return uint64_t{static_cast<uint32_t>(peer)} << 8 | op; }
};

// Numbers sends to, or receives from, one peer by tag. A tag replaces an earlier one that is equal modulo kTags, and begins at 0:
// memory and time stay bounded for programs that use a new tag each time, and both sides forget the same tags.
class TagNumbers {
 public:
  ~TagNumbers() { delete further_.load(); }

  uint32_t next(int32_t tag) {
    const uint64_t key = static_cast<uint32_t>(tag);
    const size_t at = key % format::kTags;
    std::atomic<uint64_t>& place = at == 0 ? first_ : further()[at];
    uint64_t seen = place.load(std::memory_order_relaxed);
    uint32_t number;
    do {
      number = seen >> 32 == key ? static_cast<uint32_t>(seen) : 0;
    } while (!place.compare_exchange_weak(seen, key << 32 | (number + 1), std::memory_order_relaxed));
    return number;
  }

 private:
  // Each entry: a tag and the number of its next operation. An unused entry has tag 0 and number 0.
  using Places = std::array<std::atomic<uint64_t>, format::kTags>;

  Places& further() {
    if (Places* known = further_.load(std::memory_order_acquire)) return *known;
    auto made = std::make_unique<Places>();
    Places* other = nullptr;
    return *(further_.compare_exchange_strong(other, made.get()) ? made.release() : other);
  }

  std::atomic<uint64_t> first_{0};
  // Most programs use no tags but 0, so the other places come with the first other tag.
  std::atomic<Places*> further_{nullptr};
};

struct Peer : Queue {
  TagNumbers numbers;
};

// The queues of a group's messages by operation and peer. All groups of the process have at most kMostPeers, which bounds their memory.
class Peers {
 public:
  Peers() = default;
  Peers(const Peers&) = delete;
  Peers& operator=(const Peers&) = delete;
  ~Peers() { of_process().fetch_sub(number_.load()); }

  // Null if there is no room for another. members: of the group.
  Peer* of(const PeerKey& key, size_t members) {
    auto& part = peers_.part(key, members);
    if (Peer* const known = part.find(key)) return known;
    if (of_process().fetch_add(1) >= format::kMostPeers) {
      of_process().fetch_sub(1);
      return nullptr;
    }
    const auto [peer, added] = part.add(key);
    added ? number_.fetch_add(1) : of_process().fetch_sub(1);
    return peer;
  }

 private:
  static std::atomic<int64_t>& of_process() {
    static std::atomic<int64_t> number{0};
    return number;
  }

  Many<PeerKey, Peer> peers_;
  std::atomic<int64_t> number_{0};
};

}  // namespace commwatch
