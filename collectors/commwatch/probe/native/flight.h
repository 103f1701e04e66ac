// One operation between its launch and its record, and what its bookkeeping costs. Does not depend on torch.
#pragma once

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "session.h"

namespace commwatch {

// Measures the time that the bookkeeping in its scope costs this thread.
class Cost {
 public:
  // of: number of operations that this one represents; 0: not measured. The clock is read twice, because the first read has a cold cache.
  Cost(Session& session, uint32_t of) : session_(session), of_(of), began_ns_(of != 0 && !within() ? (cpu_ns(), cpu_ns()) : 0) {
    if (began_ns_ != 0) within() = true;
  }
  Cost(const Cost&) = delete;
  Cost& operator=(const Cost&) = delete;
  ~Cost() {
    if (began_ns_ == 0) return;
    within() = false;
    static thread_local UsualCost usual;
    const uint64_t took = usual.bound(cpu_ns() - began_ns_);
    session_.spent(took > of_clock() ? (took - of_clock()) * of_ : 0);
  }

  // Number of operations of this thread that the next one represents when measured; mostly 0. Never for a first operation, which calls Python.
  static uint32_t due() {
    static thread_local CostTurns turns;
    return turns.next(clock_ns(CLOCK_MONOTONIC_COARSE));
  }

 private:
  static uint64_t cpu_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

  // The part that is only the cost of the clock: as much as the bookkeeping, or more.
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

  // Whether this thread is in such a scope; a nested one is part of the outer one.
  static bool& within() {
    static thread_local bool inside = false;
    return inside;
  }

  Session& session_;
  const uint32_t of_;
  const uint64_t began_ns_;
};

// One operation between its launch and its record. If the last reference is released before its end was seen, its record has
// no duration.
//
// On the CPU it is in the ring's table of operations in flight from its launch on. On a device a thousand may be queued; there it is in the
// table once it is the next of its queue, and marked as blocked once the device has reached it.
class Flight {
 public:
  // head: op, dtype, group, peer, tag, size, launch, seq and flags of the record to come.
  // cost_of: number of operations that this one's cost represents; 0: not measured.
  Flight(Session& session, Queue& queue, bool p2p, bool on_cpu, uint32_t cost_of, const Record& head)
      : on_cpu(on_cpu),
        cost_of_(cost_of),
        session_(session),
        ring_(*session.ring()),
        queue_(queue),
        p2p_(p2p),
        wait_seen_(on_cpu && !p2p && (head.flags & format::kAsync) != 0),
        blocked_before_ns_(sees_waits() ? session.blocked.until(head.launch_ns) : 0),
        after_skipped_(queue.skipped.load(std::memory_order_relaxed) && queue.skipped.exchange(false)),
        record_(head),
        slot_(on_cpu ? ring_.begin(head) : -1) {
    session.enter();
    if (!on_cpu) session.queued.fetch_add(1, std::memory_order_relaxed);
  }

  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  ~Flight() {
    finish(now_ns(), format::kByNone, format::kUntimed);
    if (!on_cpu) session_.queued.fetch_sub(1, std::memory_order_relaxed);
    session_.leave();
  }

  // On a device: it is the next of its queue. Called, as the next one, in the thread that will call `finish`.
  void is_next() {
    if (!inherited() && !done_.load() && slot_ < 0) slot_ = ring_.begin(record_);
  }

  // On a device, which has reached it.
  void reached(uint64_t now) {
    if (!inherited() && !done_.load()) ring_.blocked(slot_, now);
  }

  // On the CPU: another thread than the one that trains is blocked in it. Before anything can end it.
  void is_beside() { beside_ = true; }

  // The call within which NCCL is asked for it; 0: NCCL does not tell its times.
  void within(uint64_t nccl_call) { nccl_call_ = nccl_call; }
  uint64_t nccl_call() const { return nccl_call_; }

  // On a device, which has left it. Its record comes later.
  void left() {
    if (inherited() || done_.load()) return;
    ring_.end(slot_);
    slot_ = -1;
  }

  // NCCL has told its times, and what it chose for it.
  void finish_by_nccl(const commwatch_nccl_times& times) {
    if (done_.load()) return;
    record_.aux = times.choice;
    record_.tag = times.apart;  // sends and receives, which have a tag, are not timed by NCCL
    finish(times.end_ns, format::kByNccl, 0, times.begin_ns, true);
  }

  // The operation continues after its call: count it as in flight for the exposed time.
  void watch(uint64_t now) {
    if (beside_ || watched_.exchange(true)) return;
    session_.exposure.begin(now);
    if (done_.load()) unwatch(now);  // it ended in between, and did not see `watched_`
  }

  // A thread begins to wait for it, if only the wait shows the end.
  void wait_begins() {
    if (done_.load() || inherited()) return;
    const uint64_t now = now_ns();
    uint64_t nobody = 0;
    if (!blocked_since_.compare_exchange_strong(nobody, now)) return;
    if (!done_.load()) ring_.blocked(slot_, now);
    watch(now);
  }

  // A thread waits for it.
  class Waiting {
   public:
    explicit Waiting(Flight& flight)
        : blocked_(flight.session_.blocked), counts_(!flight.done() && !flight.inherited() && blocked_.begin(now_ns())) {}
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    ~Waiting() {
      if (counts_) blocked_.end(now_ns());
    }

   private:
    Blocked& blocked_;
    const bool counts_;
  };

  // Of an asynchronous collective on the CPU: a thread may wait for it where `Waiting` does not see it.
  void wait_unseen() { wait_seen_.store(false, std::memory_order_relaxed); }
  // Whether all waits for it are seen.
  bool sees_waits() const { return wait_seen_.load(std::memory_order_relaxed); }

  // began_ns: when it began on its device, 0 if not observed. on_device: measured by the device's clock.
  void finish(uint64_t end_ns, uint8_t timing, uint8_t flag = 0, uint64_t began_ns = 0, bool on_device = false) {
    if (inherited() || done_.exchange(true)) return;
    const Cost cost(session_, cost_of_);
    ring_.end(slot_);
    const bool untimed = (flag & format::kUntimed) != 0;
    if (!unwatch(end_ns) && !p2p_ && !untimed && !beside_) session_.exposure.in_call(record_.launch_ns, end_ns);
    const uint64_t blocked = blocked_since_.load();
    const bool wait_seen = !untimed && sees_waits();
    uint64_t blocked_ns = blocked != 0 && p2p_ ? end_ns - blocked : 0;
    if (wait_seen) blocked_ns = std::max(session_.blocked.until(end_ns), blocked_before_ns_) - blocked_before_ns_;
    record_.waited_us = static_cast<uint32_t>(std::min<uint64_t>(blocked_ns / 1000, UINT32_MAX));
    const uint64_t previous = untimed ? queue_.last_end_ns.load(std::memory_order_relaxed) : queue_.ended(end_ns);
    record_.start_ns = std::max({record_.launch_ns, on_device ? 0 : std::min(previous, end_ns), began_ns});
    record_.end_ns = end_ns;
    record_.flags |= flag | (wait_seen ? format::kWaitSeen : 0) | (beside_ ? format::kBeside : 0) | (after_skipped_ && !on_device ? format::kUntimed : 0);
    record_.timing = timing;
    ring_.write(record_);
  }

  // Call `what` with the session, in which this operation still is; not in a forked child, where it belongs to the parent.
  template <class What>
  void in_session(What what) {
    if (!inherited()) what(session_);
  }

  bool done() const { return done_.load(); }
  uint64_t launched_ns() const { return record_.launch_ns; }
  bool p2p() const { return p2p_; }

  const bool on_cpu;

 private:
  bool unwatch(uint64_t now) {
    if (!watched_.exchange(false)) return false;
    session_.exposure.end(now);
    return true;
  }

  // Whether this is a forked child: ring and operation belong to the parent.
  bool inherited() const { return life_ != forks.load(std::memory_order_relaxed); }

  const uint32_t cost_of_;
  Session& session_;
  Ring& ring_;
  Queue& queue_;
  const bool p2p_;
  std::atomic<bool> wait_seen_;
  const uint64_t blocked_before_ns_;
  const bool after_skipped_;
  Record record_;
  int slot_;
  const uint32_t life_ = forks.load(std::memory_order_relaxed);
  uint64_t nccl_call_ = 0;
  bool beside_ = false;
  std::atomic<bool> done_{false};
  std::atomic<bool> watched_{false};
  std::atomic<uint64_t> blocked_since_{0};
};

}  // namespace commwatch
