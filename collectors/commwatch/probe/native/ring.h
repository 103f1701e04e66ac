// The writer's side of the ring file (collectors/commwatch/wire/ring.py defines the layout and who may write what).
//
// Any number of threads write at once, and none waits for another. A record is eight words, with stamps in the first and
// the last. Each word is stored with release, so a reader that sees the last stamp sees all earlier words.
#pragma once

#include <cstdint>
#include <cstring>

#include "format.h"

namespace commwatch {

struct Record {
  uint32_t stamp = 0;
  uint8_t op = 0;
  uint8_t dtype = 0;
  uint16_t group = 0;
  int32_t peer = -1;
  int32_t tag = 0;
  uint64_t size_bytes = 0;
  uint64_t launch_ns = 0;
  uint32_t seq = 0;
  uint32_t waited_us = 0;
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint8_t flags = 0;
  uint8_t timing = 0;
  uint16_t aux = 0;
  uint32_t stamp2 = 0;
};
static_assert(sizeof(Record) == format::kRecordSize, "the layout of events.RECORD");

class Ring {
 public:
  // base: the mapped file, with a header; slots: as the header says.
  Ring(char* base, uint64_t slots) : base_(base), slots_(slots) {}

  void write(Record record) {
    const uint64_t n = __atomic_fetch_add(&next_, 1, __ATOMIC_RELAXED);
    record.stamp = record.stamp2 = static_cast<uint32_t>(n + 1);
    uint64_t words[kWords];
    std::memcpy(words, &record, sizeof words);
    uint64_t* slot = at(format::kRecordsAt + n % slots_ * format::kRecordSize);
    for (int i = 0; i < kWords; ++i) __atomic_store_n(slot + i, words[i], __ATOMIC_RELEASE);
    raise_counter(format::kCursor, n + 1);
  }

  // Enter an operation into the table of operations in flight. Returns its slot, -1 if the table is full.
  int begin(Record record) {
    const uint64_t n = add(format::kOpsStarted, 1);
    uint64_t used = __atomic_load_n(&used_, __ATOMIC_RELAXED);
    uint64_t bit;
    do {
      if (used == ~uint64_t{0}) {
        add(format::kInFlightOverflow, 1);
        return -1;
      }
      bit = ~used & (used + 1);
    } while (!__atomic_compare_exchange_n(&used_, &used, used | bit, true, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED));
    const uint32_t stamp = static_cast<uint32_t>(n);
    record.stamp = record.stamp2 = stamp != 0 ? stamp : 1;
    uint64_t words[kWords];
    std::memcpy(words, &record, sizeof words);
    const int slot = __builtin_ctzll(bit);
    uint64_t* place = in_flight(slot);
    // The stamp that makes it valid comes last.
    for (int i = kWords - 1; i >= 0; --i) __atomic_store_n(place + i, words[i], __ATOMIC_RELEASE);
    return slot;
  }

  // A thread has been waiting for the operation in `slot` since `since_ns`; 0: no longer.
  void blocked(int slot, uint64_t since_ns) {
    if (slot < 0) return;
    char* place = reinterpret_cast<char*>(in_flight(slot));
    __atomic_store_n(reinterpret_cast<uint64_t*>(place + format::kStartAt), since_ns, __ATOMIC_RELEASE);
    auto* flags = reinterpret_cast<uint8_t*>(place + format::kFlagsAt);
    if (since_ns != 0) {
      __atomic_fetch_or(flags, format::kBlocked, __ATOMIC_RELEASE);
    } else {
      __atomic_fetch_and(flags, static_cast<uint8_t>(~format::kBlocked), __ATOMIC_RELEASE);
    }
  }

  // Free a slot of the table.
  void end(int slot) {
    if (slot < 0) return;
    __atomic_store_n(in_flight(slot), 0, __ATOMIC_RELEASE);
    __atomic_fetch_and(&used_, ~(uint64_t{1} << slot), __ATOMIC_RELEASE);
  }

  // Note the split sizes of an all_to_all (splits.py). fill: writes them at the place that it gets.
  template <class Fill>
  void note_splits(const Record& record, uint16_t members, Fill fill) {
    const uint64_t number = add(format::kSplits, 1);
    uint64_t* entry = at(format::kRecordsAt + slots_ * format::kRecordSize + number % format::kSplitsCalls * format::kSplitsEntryBytes);
    __atomic_store_n(entry, 0, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    entry[1] = uint64_t{members} << 48 | uint64_t{record.group} << 32 | record.seq;
    fill(entry + 2);
    __atomic_store_n(entry, number, __ATOMIC_RELEASE);
  }

  int in_flight_now() const { return __builtin_popcountll(__atomic_load_n(&used_, __ATOMIC_RELAXED)); }

  // Returns the counter's new value.
  uint64_t add(int counter, uint64_t amount) { return __atomic_add_fetch(place_of(counter), amount, __ATOMIC_RELAXED); }

  uint64_t get(int counter) { return __atomic_load_n(place_of(counter), __ATOMIC_RELAXED); }

  void set(int counter, uint64_t value) { __atomic_store_n(place_of(counter), value, __ATOMIC_RELEASE); }

 private:
  static constexpr int kWords = format::kRecordSize / 8;

  uint64_t* at(uint64_t offset) { return reinterpret_cast<uint64_t*>(base_ + offset); }
  uint64_t* in_flight(int slot) { return at(format::kInFlightAt + static_cast<uint64_t>(slot) * format::kRecordSize); }
  uint64_t* place_of(int counter) { return at(format::kCountersAt) + counter; }

  void raise_counter(int counter, uint64_t value) {
    uint64_t* place = place_of(counter);
    uint64_t seen = __atomic_load_n(place, __ATOMIC_RELAXED);
    while (seen < value &&
           !__atomic_compare_exchange_n(place, &seen, value, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED)) {
    }
  }

  char* const base_;
  const uint64_t slots_;
  uint64_t next_ = 0;
  uint64_t used_ = 0;  // one bit for each slot of the in-flight table
};

static_assert(format::kInFlightSlots == 64, "one bit each");

}  // namespace commwatch
