// What the hook keeps between install and uninstall: the groups with their counters, and the operations in flight.
// Nothing here knows torch.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "exposure.h"
#include "governor.h"
#include "poller.h"
#include "ring.h"

namespace commwatch {

// A map that only grows, for a handful of keys: reading takes no lock, adding neither.
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
      if (Node* found = find(added->next, checked, key)) return found->value;  // another thread was faster
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
  // The latest was only counted: when the next one begins is not known.
  std::atomic<bool> skipped{false};

  // An operation ended at `end_ns`: when the one before had, or 0.
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

struct TagKey {
  PeerKey peer;
  int32_t tag;
  bool operator==(const TagKey& other) const { return peer == other.peer && tag == other.tag; }
};

// What is counted together: operations of one kind and size class, S <= 2**size_log2 (-1: without a size).
struct CountKey {
  uint8_t op;
  int8_t size_log2;
  uint8_t flags;
  bool operator==(const CountKey& other) const { return op == other.op && size_log2 == other.size_log2 && flags == other.flags; }
};

// How many, and their bytes, in one word, so that both are taken at the same moment. Of one second: a million, 17 TB.
struct Counted {
  static constexpr int kBytesBits = 44;
  static constexpr uint64_t kBytes = (uint64_t{1} << kBytesBits) - 1;
  std::atomic<uint64_t> sums{0};
  std::atomic<uint32_t> seq{0};
  std::atomic<uint64_t> launch_ns{0};
};

struct Group {
  Group(const void* a, std::string n) : address(a), name(std::move(n)) {}

  // An operation that is not recorded by itself.
  void count(const Record& record, bool p2p) {
    const uint64_t size = std::min(record.size_bytes, Counted::kBytes);
    const int log2 = size > 1 ? 64 - __builtin_clzll(size - 1) : static_cast<int>(size) - 1;
    const auto flags = static_cast<uint8_t>(record.flags & (format::kNoSize | format::kUnaligned));
    Counted& counted = counts[CountKey{record.op, static_cast<int8_t>(log2), flags}];
    if (!p2p) counted.seq.store(record.seq, std::memory_order_relaxed);
    counted.launch_ns.store(record.launch_ns, std::memory_order_relaxed);
    counted.sums.fetch_add((uint64_t{1} << Counted::kBytesBits) + size, std::memory_order_release);
  }

  // Write down what has been counted since the last time.
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

  // Of the process group. A later group may have the same, so the name counts too, and whether it was made anew since.
  const void* const address;
  const std::string name;
  std::atomic<bool> stale{false};
  int size = 0;
  uint16_t small_id = format::kNoGroup;
  bool aligned = false;
  std::vector<int32_t> ranks;
  std::atomic<uint32_t> next_seq{0};
  // Its backend has been asked to time operations on devices.
  std::atomic<bool> times_asked{false};
  Queue collectives;
  Few<PeerKey, Queue> peers;
  Few<TagKey, std::atomic<uint32_t>> tags;
  Few<CountKey, Counted> counts;
  Group* next = nullptr;
};

// How many forks lie between this process and the one that loaded the library.
inline std::atomic<uint32_t> forks{0};

// What only the Python side can do: make the ring, and give names their numbers. Called with no lock held.
struct Python {
  int (*open)(void* session) = nullptr;
  void (*add_group)(void* group, const void* address, const char* name, const char* description, int size) = nullptr;
  int (*add_dtype)(const char* name) = nullptr;
  int (*add_op)(const char* name) = nullptr;
};

// Lives as long as the process: a thread may still look at it when it is long over. Its ring is unmapped, and its groups
// are freed, once the last operation has left.
class Session {
 public:
  // budget: part of the time that the probe may take; 0: any.
  Session(const Python& python, clockid_t training_thread, double budget)
      : python(python), exposure(training_thread, now_ns()), governor_(budget) {}

  // -- life

  // Take over the ring behind `fd`, once. False where it cannot be mapped.
  bool attach(int fd, uint64_t slots) {
    const size_t size = format::kRecordsAt + slots * format::kRecordSize;
    void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return false;
    base_ = static_cast<char*>(base);
    size_ = size;
    Ring* const ring = new Ring(base_, slots);
    window_ns_ = now_ns();
    poller_ = std::make_unique<Poller>(
        [] {
          sigset_t all;
          sigfillset(&all);
          pthread_sigmask(SIG_BLOCK, &all, nullptr);
        },
        [this, ring] { beat(*ring, now_ns()); });
    ring_.store(ring);
    if (off.load()) ring->set(format::kClosed, now_ns());  // `close` has come and gone meanwhile, and has not seen the ring
    return true;
  }

  // Nothing is launched any more. Operations in flight still find their record; what the poller looked after has no end.
  void close() {
    off.store(true);
    if (Ring* ring = this->ring()) {
      poller_->stop();
      write_counts(*ring, now_ns());
      ring->set(format::kClosed, now_ns());
    }
    leave();
  }

  // Nobody is in it any more, nor will be: it calls no function of Python's and writes into no ring.
  bool over() const { return cleared_.load(); }

  // Whoever has entered, after making sure that the session is still the current one, may use all of it until it leaves.
  void enter() { users_.fetch_add(1); }

  void leave() {
    if (users_.fetch_sub(1) != 1 || cleared_.exchange(true)) return;
    if (Ring* ring = this->ring()) {
      poller_.reset();
      delete ring;
      munmap(base_, size_);
    }
    for (auto& bucket : groups_) {
      for (Group* group = bucket.load(); group != nullptr;) delete std::exchange(group, group->next);
    }
  }

  // A fault of ours: switch off, count it, say it once. Training goes on.
  void fault(const char* doing, const char* what) {
    if (off.exchange(true)) return;
    if (Ring* ring = this->ring()) ring->add(format::kDropped, 1);
    say("probe switched off", doing, what);
  }

  // One line to standard error.
  static void say(const char* happened, const char* doing, const char* what) {
    const char* rank = getenv("RANK");
    dprintf(STDERR_FILENO, "commwatch: %s in rank %s: %s: %s\n", happened, rank != nullptr ? rank : "?", doing, what);
  }

  Ring* ring() const { return ring_.load(std::memory_order_acquire); }
  Poller& poller() { return *poller_; }

  // -- groups

  Group* find(const void* address, const std::string& name) const {
    for (Group* group = bucket_of(address).load(std::memory_order_acquire); group != nullptr; group = group->next) {
      if (group->address == address && !group->stale.load(std::memory_order_relaxed) && group->name == name) return group;
    }
    return nullptr;
  }

  // Publish a group that is complete. Where another thread was faster, its group: give it that one's counters.
  Group* add(std::unique_ptr<Group> group) {
    const std::lock_guard<std::mutex> lock(adding_);
    if (Group* other = find(group->address, group->name)) return other;
    auto& bucket = bucket_of(group->address);
    group->next = bucket.load(std::memory_order_relaxed);
    bucket.store(group.get(), std::memory_order_release);
    return group.release();
  }

  // A group of that name has been made: what had it before is another one.
  void forget(const std::string& name) {
    const std::lock_guard<std::mutex> lock(adding_);
    for (auto& bucket : groups_) {
      for (Group* group = bucket.load(std::memory_order_relaxed); group != nullptr; group = group->next) {
        if (group->name == name) group->stale.store(true, std::memory_order_relaxed);
      }
    }
  }

  // -- what a step brought

  void mark(Record record) {
    Ring* ring = this->ring();
    if (ring == nullptr || off.load(std::memory_order_relaxed)) return;
    clockid_t clock;
    if (pthread_getcpuclockid(pthread_self(), &clock) == 0) exposure.watch(clock);
    const int64_t exposed = exposure.take(record.end_ns);
    if (skipped_.exchange(false, std::memory_order_relaxed)) {
      record.flags |= format::kUntimed;
    } else if (exposed != Exposure::kUnknown) {
      record.flags |= format::kExposed;
      record.size_bytes = static_cast<uint64_t>(exposed);
    }
    record.aux = static_cast<uint16_t>(ring->in_flight_now());
    ring->write(record);
  }

  // -- what it costs, and how much is recorded for that

  void spent(uint64_t cost_ns) {
    if (Ring* ring = this->ring()) ring->add(format::kProbeNs, cost_ns);
    measured_.fetch_add(1, std::memory_order_relaxed);
  }

  // Whether an operation is to be recorded by itself. Otherwise it is to be counted.
  bool records(uint32_t seq) const {
    const format::Mode mode = mode_.load(std::memory_order_relaxed);
    return mode == format::Mode::kFull || (mode == format::Mode::kSampling && is_sampled(seq));
  }

  // One has been counted: what its step's communication took is not known.
  void skipped() { skipped_.store(true, std::memory_order_relaxed); }

  const Python python;
  std::atomic<bool> off{false};
  Exposure exposure;
  Few<int, std::atomic<uint8_t>> dtypes;

 private:
  static constexpr size_t kBuckets = 64;

  // Once a second, in the poller's thread: a sign of life, what has only been counted, and perhaps a window of the governor's is over.
  void beat(Ring& ring, uint64_t now) {
    ring.set(format::kHeartbeat, now);
    write_counts(ring, now);
    if (!Governor::is_over(now - window_ns_, measured_.load(std::memory_order_relaxed))) return;
    measured_.store(0, std::memory_order_relaxed);
    const uint64_t spent = ring.get(format::kProbeNs);
    const format::Mode before = mode_.load(), mode = governor_.window(static_cast<double>(spent - spent_ns_) / static_cast<double>(now - window_ns_));
    window_ns_ = now;
    spent_ns_ = spent;
    if (mode != before) {
      mode_.store(mode);
      ring.set(format::kModeSinceNs, now);
      ring.set(format::kMode, static_cast<uint64_t>(mode));
    }
  }

  void write_counts(Ring& ring, uint64_t now) {
    for (auto& bucket : groups_) {
      for (Group* group = bucket.load(std::memory_order_acquire); group != nullptr; group = group->next) group->write_counts(ring, now);
    }
  }

  std::atomic<Group*>& bucket_of(const void* address) { return groups_[reinterpret_cast<uintptr_t>(address) / 64 % kBuckets]; }
  const std::atomic<Group*>& bucket_of(const void* address) const {
    return groups_[reinterpret_cast<uintptr_t>(address) / 64 % kBuckets];
  }

  std::atomic<Ring*> ring_{nullptr};
  std::unique_ptr<Poller> poller_;
  char* base_ = nullptr;
  size_t size_ = 0;
  Governor governor_;  // the poller's thread's, as are the two after it
  uint64_t window_ns_ = 0;
  uint64_t spent_ns_ = 0;
  std::atomic<uint32_t> measured_{0};
  std::atomic<format::Mode> mode_{format::Mode::kFull};
  std::atomic<bool> skipped_{false};
  std::atomic<int64_t> users_{1};
  std::atomic<bool> cleared_{false};
  std::mutex adding_;
  std::atomic<Group*> groups_[kBuckets] = {};
};

// What the bookkeeping in its scope costs this thread, counted for the many operations that are not measured.
class Cost {
 public:
  Cost(Session& session, bool measured) : session_(session), began_ns_(measured && !within() ? cpu_ns() : 0) {
    if (began_ns_ != 0) within() = true;
  }
  Cost(const Cost&) = delete;
  Cost& operator=(const Cost&) = delete;
  ~Cost() {
    if (began_ns_ == 0) return;
    within() = false;
    const uint64_t took = cpu_ns() - began_ns_;
    session_.spent(took > of_clock() ? (took - of_clock()) * format::kCostSample : 0);
  }

  // Whether the next operation of this thread is one of those that are measured. Not its first, which asks Python.
  static bool due() {
    static thread_local unsigned operations = 0;
    return ++operations % format::kCostSample == 0;
  }

 private:
  static uint64_t cpu_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

  // What of it is only the clock's own cost: as much as the bookkeeping, or more.
  static uint64_t of_clock() {
    static const uint64_t least = [] {
      uint64_t found = UINT64_MAX;
      for (int i = 0; i < 64; ++i) {
        const uint64_t began = cpu_ns();
        found = std::min(found, cpu_ns() - began);
      }
      return found;
    }();
    return least;
  }

  // This thread is in such a scope: one within it is part of that.
  static bool& within() {
    static thread_local bool inside = false;
    return inside;
  }

  Session& session_;
  const uint64_t began_ns_;
};

// One operation between its launch and its record. Whoever lets go of it last without having seen its end makes it one
// without a duration.
class Flight {
 public:
  // head: op, dtype, group, peer, tag, size, launch, seq and flags of the record to come.
  // costed: what it costs is measured.
  Flight(Session& session, Queue& queue, bool p2p, bool on_cpu, bool costed, const Record& head)
      : on_cpu(on_cpu),
        costed_(costed),
        session_(session),
        ring_(*session.ring()),
        queue_(queue),
        p2p_(p2p),
        after_skipped_(queue.skipped.load(std::memory_order_relaxed) && queue.skipped.exchange(false)),
        record_(head),
        slot_(ring_.begin(head)) {
    session.enter();
  }

  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  ~Flight() {
    finish(now_ns(), format::kByNone, format::kUntimed);
    session_.leave();
  }

  // The operation goes on after its call: count it as in flight for the exposed time.
  void watch(uint64_t now) {
    if (watched_.exchange(true)) return;
    session_.exposure.begin(now);
    if (done_.load()) unwatch(now);  // it has ended meanwhile, and did not see this
  }

  // A thread begins to wait for it, where only the wait tells the end.
  void wait_begins() {
    if (done_.load() || inherited()) return;
    const uint64_t now = now_ns();
    uint64_t nobody = 0;
    if (!blocked_since_.compare_exchange_strong(nobody, now)) return;
    if (!done_.load()) ring_.blocked(slot_, now);
    watch(now);
  }

  // began_ns: when it began on its device, as far as that was seen. on_device: its own clock has measured it.
  void finish(uint64_t end_ns, uint8_t timing, uint8_t flag = 0, uint64_t began_ns = 0, bool on_device = false) {
    if (inherited() || done_.exchange(true)) return;
    const Cost cost(session_, costed_);
    ring_.end(slot_);
    const bool untimed = (flag & format::kUntimed) != 0;
    if (!unwatch(end_ns) && !p2p_ && !untimed) session_.exposure.in_call(record_.launch_ns, end_ns);
    const uint64_t blocked = blocked_since_.load();
    if (blocked != 0 && p2p_) record_.waited_us = static_cast<uint32_t>(std::min<uint64_t>((end_ns - blocked) / 1000, UINT32_MAX));
    const uint64_t previous = untimed ? queue_.last_end_ns.load(std::memory_order_relaxed) : queue_.ended(end_ns);
    record_.start_ns = std::max({record_.launch_ns, on_device ? 0 : std::min(previous, end_ns), began_ns});
    record_.end_ns = end_ns;
    record_.flags |= flag | (after_skipped_ && !on_device ? format::kUntimed : 0);
    record_.timing = timing;
    ring_.write(record_);
  }

  bool done() const { return done_.load(); }
  bool p2p() const { return p2p_; }

  const bool on_cpu;

 private:
  bool unwatch(uint64_t now) {
    if (!watched_.exchange(false)) return false;
    session_.exposure.end(now);
    return true;
  }

  // In a forked child: the ring is the parent's, and the operation too.
  bool inherited() const { return life_ != forks.load(std::memory_order_relaxed); }

  const bool costed_;
  Session& session_;
  Ring& ring_;
  Queue& queue_;
  const bool p2p_;
  const bool after_skipped_;
  Record record_;
  const int slot_;
  const uint32_t life_ = forks.load(std::memory_order_relaxed);
  std::atomic<bool> done_{false};
  std::atomic<bool> watched_{false};
  std::atomic<uint64_t> blocked_since_{0};
};

}  // namespace commwatch
