// The hook's state between install and uninstall: the ring, the groups, and how much is recorded. Does not depend on torch.
#pragma once

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "aside.h"
#include "blocked.h"
#include "checks.h"
#include "exposure.h"
#include "governor.h"
#include "graphs.h"
#include "groups.h"
#include "nccl_plugin.h"
#include "poller.h"
#include "retention.h"
#include "ring.h"
#include "standard_error.h"
#include "stream_waits.h"
#include "training.h"

namespace commwatch {

// Number of forks between the process that loaded the library and this one.
inline std::atomic<uint32_t> forks{0};

// Functions of the Python side: create the ring, and assign numbers to names. Called in another thread (aside.h), with no lock held.
struct Python {
  int (*open)(void* session, int group_rank, int group_size, int gpu) = nullptr;
  void (*add_group)(void* group, const void* address, const char* name, const char* description, int size) = nullptr;
  int (*add_dtype)(const char* name) = nullptr;
  int (*add_op)(const char* name) = nullptr;
};

// Never destroyed: a thread may still access it long after it is closed. Its ring is unmapped, and its groups are freed,
// once the last operation has left.
class Session {
 public:
  // budget: fraction of the time that the probe may take; 0: unlimited.
  Session(const Python& python, clockid_t training_thread, double budget)
      : python(python), exposure(training_thread, now_ns()), governor_(budget) {}

  // -- lifetime

  // Take over the ring that is mapped at `there`, once, with a mapping of its own. Returns 0, or the errno of the failure.
  // If `close` was called before, the ring is closed, and the session has none.
  int attach(void* there, uint64_t slots) {
    const size_t size = format::kRecordsAt + slots * format::kRecordSize + format::kSplitsAreaBytes;
    void* const base = mremap(there, 0, size, MREMAP_MAYMOVE);  // an old size of 0 maps the same pages again
    if (base == MAP_FAILED) return errno;
    std::unique_ptr<Ring> made;
    const std::lock_guard<std::mutex> lock(closing_);
    try {
      made = std::make_unique<Ring>(static_cast<char*>(base), slots);
      if (closed_) {
        made->set(format::kClosed, now_ns());
        munmap(base, size);
        return 0;
      }
      window_ns_ = now_ns();
      poller_ = std::make_unique<Poller>([] { begin_thread("commwatch-poll"); });
      heartbeat_ = std::make_unique<Heartbeat>([] { begin_thread("commwatch-beat"); },
                                               [this, ring = made.get()] { beat(*ring, now_ns()); });
    } catch (const std::exception&) {  // no thread
      munmap(base, size);
      return EAGAIN;
    }
    base_ = static_cast<char*>(base);
    size_ = size;
    ring_.store(made.release());
    return 0;
  }

  // Called in a forked child: the file belongs to the parent, and its lock must end with the parent.
  void let_go() {
    if (ring() != nullptr) mmap(base_, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }

  // No more operations are launched. Those in flight can still write their record; those that the poller watched get no end.
  void close() {
    off.store(true);
    {
      const std::lock_guard<std::mutex> lock(closing_);
      closed_ = true;
    }
    if (Ring* ring = this->ring()) {
      poller_->stop();
      heartbeat_->stop();
      write_counts(*ring, now_ns());
      ring->set(format::kClosed, now_ns());
    }
    leave(kOpen);
  }

  // Whether no thread is in the session or will enter it: it calls no function of Python and writes to no ring any more.
  bool over() const { return cleared_.load(); }

  // A thread that has entered, and then checked that the session is still the current one, may use all of it until it leaves.
  void enter() { users_.fetch_add(1); }

  void leave(int64_t number = 1) {
    if (users_.fetch_sub(number) != number || life_ != forks.load() || cleared_.exchange(true)) return;
    if (Ring* ring = this->ring()) {
      delete ring;
      munmap(base_, size_);
    }
    for (auto& bucket : groups_) {
      for (Group* group = bucket.load(); group != nullptr;) delete std::exchange(group, group->next.load());
    }
    retired_.clear();
  }

  // A fault of the probe: switch off, count it, and report it once. Training continues.
  void fault(const char* doing, const char* what) {
    if (off.exchange(true)) return;
    if (Ring* ring = this->ring()) ring->add(format::kDropped, 1);
    say("probe switched off", doing, what);
  }

  // Print one line to standard error: of `what`, the first, as what() of torch's exceptions has a backtrace.
  static void say(const char* happened, const char* doing, const char* what) {
    const char* rank = getenv("RANK");
    const int length = static_cast<int>(strcspn(what, "\n"));
    char line[1024];
    const int wanted = snprintf(line, sizeof line, "commwatch: %s in rank %s: %s: %.*s\n", happened, rank != nullptr ? rank : "?", doing, length, what);
    if (wanted < 0) return;
    const size_t size = std::min(static_cast<size_t>(wanted), sizeof line - 1);
    line[size - 1] = '\n';
    StandardError::write(line, size);
  }

  Ring* ring() const { return ring_.load(std::memory_order_acquire); }
  Poller& poller() { return *poller_; }

  // -- groups

  Group* find(const void* address, const std::string& name) const {
    for (Group* group = bucket_of(address).load(std::memory_order_acquire); group != nullptr; group = group->next.load(std::memory_order_acquire)) {
      if (group->address == address && group->name == name) return group;
    }
    return nullptr;
  }

  // Publish a complete group and return it; if another thread was faster, return that thread's group. The caller has entered.
  Group* add(std::unique_ptr<Group> group) {
    const std::lock_guard<std::mutex> lock(adding_);
    if (Group* other = find(group->address, group->name)) return other;
    auto& bucket = bucket_of(group->address);
    retire(bucket, [&](const Group& old) { return old.address == group->address; });  // two live groups cannot have one address
    free_retired();
    group->next.store(bucket.load(std::memory_order_relaxed), std::memory_order_relaxed);
    bucket.store(group.get(), std::memory_order_release);
    return group.release();
  }

  // A group with this name has been created, so earlier groups with that name are retired. The caller has entered.
  void forget(const std::string& name) {
    const std::lock_guard<std::mutex> lock(adding_);
    for (auto& bucket : groups_) retire(bucket, [&](const Group& old) { return old.name == name; });
    free_retired();
  }

  // Whether there is room for one more group: not while too many are retired and cannot be freed because other threads are in the
  // session. The caller has entered.
  bool has_room() {
    const std::lock_guard<std::mutex> lock(adding_);
    if (retired_.size() >= kMostRetired) free_retired();
    return retired_.size() < kMostRetired;
  }

  // -- steps

  void mark(Record record) {
    Ring* ring = this->ring();
    if (ring == nullptr || off.load(std::memory_order_relaxed)) return;
    clockid_t clock;
    if (pthread_getcpuclockid(pthread_self(), &clock) == 0) exposure.watch(clock);
    training.here();
    const int64_t on_cpu = exposure.take(record.end_ns), exposed = exposure.on_device() ? waits.take() : on_cpu;
    if (skipped_.exchange(false, std::memory_order_relaxed)) {
      record.flags |= format::kUntimed;
    } else if (exposed >= 0) {
      record.flags |= format::kExposed;
      record.size_bytes = static_cast<uint64_t>(exposed);
      record.timing = exposure.on_device() ? format::kByEvents : format::kByNone;
    }
    const uint32_t in_flight = static_cast<uint32_t>(ring->in_flight_now()) + queued.load(std::memory_order_relaxed);
    record.aux = static_cast<uint16_t>(std::min<uint32_t>(in_flight, UINT16_MAX));
    ring->write(record);
  }

  // -- costs, and how much is recorded

  void spent(uint64_t cost_ns) {
    if (Ring* ring = this->ring()) ring->add(format::kProbeNs, cost_ns);
    measured_.fetch_add(1, std::memory_order_relaxed);
  }

  // Whether an operation gets a record of its own. Otherwise it is only counted.
  bool records(uint32_t seq) const {
    const format::Mode mode = mode_.load(std::memory_order_relaxed);
    return mode == format::Mode::kFull || (mode == format::Mode::kSampling && is_sampled(seq));
  }

  // Whether every operation does.
  bool records_all() const { return mode_.load(std::memory_order_relaxed) == format::Mode::kFull; }

  // An operation was only counted, so the communication time of its step is unknown.
  void skipped() { skipped_.store(true, std::memory_order_relaxed); }

  const Python python;
  std::atomic<bool> off{false};
  Exposure exposure;
  Blocked blocked;
  Training training;
  StreamWaits waits;
  Graphs graphs;
  Retention retention;
  Checks checks;
  // Operations on devices that have not ended.
  std::atomic<uint32_t> queued{0};
  Few<int, std::atomic<uint8_t>> dtypes;
  // Numbers of operators that are not in the table of operations, by their kernels.
  Few<const void*, std::atomic<int>> op_codes;

 private:
  static constexpr int kBucketBits = 10;
  static constexpr size_t kBuckets = size_t{1} << kBucketBits, kMostRetired = 1024;
  static constexpr int64_t kOpen = int64_t{1} << 32;

  // Called once a second in the heartbeat's thread: writes the heartbeat and the counts, and ends the governor's window if it is over.
  void beat(Ring& ring, uint64_t now) {
    ring.set(format::kHeartbeat, now);
    write_counts(ring, now);
    checks.govern(now);
    const uint64_t lost = NcclPlugin::lost();
    ring.add(format::kDropped, lost - std::exchange(lost_, lost));
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
    const std::lock_guard<std::mutex> lock(adding_);
    for (auto& bucket : groups_) {
      for (Group* group = bucket.load(); group != nullptr; group = group->next.load()) group->write_counts(ring, now);
    }
    for (auto& group : retired_) group->write_counts(ring, now);
  }

  // Remove groups from their bucket. They keep their `next` for concurrent readers, and their queues for operations in flight.
  template <class Which>
  void retire(std::atomic<Group*>& bucket, Which which) {
    for (std::atomic<Group*>* place = &bucket; Group* const group = place->load();) {
      if (which(*group)) {
        place->store(group->next.load());
        retired_.emplace_back(group);
      } else {
        place = &group->next;
      }
    }
  }

  // Free the retired groups if only the caller is in the session: threads that enter later cannot find them.
  void free_retired() {
    int64_t caller_alone = kOpen + 1;
    if (!users_.compare_exchange_strong(caller_alone, caller_alone)) return;
    for (auto& group : retired_) group->write_counts(*ring(), now_ns());
    retired_.clear();
  }

  static size_t bucket(const void* address) { return mixed(reinterpret_cast<uintptr_t>(address)) >> (64 - kBucketBits); }
  std::atomic<Group*>& bucket_of(const void* address) { return groups_[bucket(address)]; }
  const std::atomic<Group*>& bucket_of(const void* address) const { return groups_[bucket(address)]; }

  std::atomic<Ring*> ring_{nullptr};
  std::mutex closing_;  // `attach` comes before `close` or after it
  bool closed_ = false;
  std::unique_ptr<Poller> poller_;  // stopped only by `close`, and kept, because its thread may be the last to leave
  std::unique_ptr<Heartbeat> heartbeat_;
  char* base_ = nullptr;
  size_t size_ = 0;
  Governor governor_;  // used only by the heartbeat's thread, as are the next three
  uint64_t lost_ = NcclPlugin::lost();
  uint64_t window_ns_ = 0;
  uint64_t spent_ns_ = 0;
  std::atomic<uint32_t> measured_{0};
  std::atomic<format::Mode> mode_{format::Mode::kFull};
  std::atomic<bool> skipped_{false};
  std::atomic<int64_t> users_{kOpen};  // threads in the session, plus kOpen until it is closed
  std::atomic<bool> cleared_{false};
  const uint32_t life_ = forks.load();  // in a forked child the threads do not exist
  std::mutex adding_;
  std::atomic<Group*> groups_[kBuckets] = {};
  std::vector<std::unique_ptr<Group>> retired_;  // no longer found, but perhaps still in use
};

// Gives an operation the next number of its queue, which it returns. A message for whose peer there is no room has no peer from then on.
inline Queue& numbered(Group& group, bool p2p, Record* record) {
  if (!p2p) {
    record->seq = group.next_seq.fetch_add(1);
    return group.collectives;
  }
  Peer* peer = record->peer >= 0 ? group.peers.of(PeerKey{record->op, record->peer}, group.ranks.size()) : nullptr;
  if (peer == nullptr) {
    record->peer = -1;
    peer = &group.without_peer[record->op];
  }
  record->seq = peer->numbers.next(record->tag);
  return *peer;
}

// Returns whether an operation gets a record of its own. If not, counts it.
inline bool records(Session& session, Group& group, Queue& queue, bool p2p, const Record& record) {
  if (session.records(record.seq)) return true;
  group.count(record, p2p);
  queue.skipped.store(true, std::memory_order_relaxed);
  session.skipped();
  return false;
}

}  // namespace commwatch
