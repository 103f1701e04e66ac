// Shared by the drivers: a check with a name, threads that start together, and a record whose content can be checked.
#pragma once

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <thread>
#include <vector>

#include "ring.h"

constexpr int kThreads = 8;
constexpr uint64_t kMs = 1'000'000;

inline void check(bool holds, const char* name, int line) {
  if (holds) return;
  fprintf(stderr, "FAILED: %s (line %d)\n", name, line);
  fflush(stderr);
  _Exit(1);
}
#define CHECK(holds, name) check((holds), (name), __LINE__)

// A barrier that spins instead of sleeping, so that all threads leave it together.
class Meeting {
 public:
  explicit Meeting(int members) : members_(members) {}
  void meet() {
    const int round = round_.load();
    if (come_.fetch_add(1) + 1 == members_) {
      come_.store(0);
      round_.fetch_add(1);
    } else {
      while (round_.load() == round) sched_yield();
    }
  }

 private:
  const int members_;
  std::atomic<int> come_{0}, round_{0};
};

// Run body(0) ... body(count - 1) at once.
template <class Body>
void in_threads(int count, Body body) {
  Meeting start(count);
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      start.meet();
      body(i);
    });
  }
  for (auto& thread : threads) thread.join();
}

// Wait until the condition holds. Only never is a failure; late on a busy machine is not.
template <class Condition>
void wait_until(Condition holds, const char* name) {
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  while (!holds()) {
    CHECK(std::chrono::steady_clock::now() < patience, name);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// The i-th record of a writer: every field identifies it.
inline commwatch::Record record_of(uint16_t writer, uint32_t i) {
  const uint64_t about = (uint64_t{writer} << 32 | i) * 0x9E3779B97F4A7C15u;
  commwatch::Record record;
  record.op = static_cast<uint8_t>(about);
  record.dtype = static_cast<uint8_t>(about >> 8);
  record.group = writer;
  record.peer = static_cast<int32_t>(about >> 16);
  record.tag = static_cast<int32_t>(about >> 24);
  record.size_bytes = about;
  record.launch_ns = ~about;
  record.seq = i;
  record.waited_us = static_cast<uint32_t>(about >> 32);
  record.start_ns = about + 1;
  record.end_ns = about + 2;
  record.flags = static_cast<uint8_t>(about >> 40);
  record.timing = static_cast<uint8_t>(about >> 48);
  record.aux = static_cast<uint16_t>(about >> 44);
  return record;
}

inline bool same(commwatch::Record record, const commwatch::Record& expected) {
  record.stamp = expected.stamp;
  record.stamp2 = expected.stamp2;
  return memcmp(&record, &expected, sizeof record) == 0;
}

// A ring in memory, with its reader.
class Memory {
 public:
  explicit Memory(uint64_t slots) : words_((commwatch::format::kRecordsAt + slots * commwatch::format::kRecordSize) / 8) {}
  char* base() { return reinterpret_cast<char*>(words_.data()); }
  uint64_t counter(int index) { return __atomic_load_n(at(commwatch::format::kCountersAt) + index, __ATOMIC_ACQUIRE); }
  commwatch::Record record(uint64_t slot) { return copy(commwatch::format::kRecordsAt, slot); }
  commwatch::Record in_flight(uint64_t slot) { return copy(commwatch::format::kInFlightAt, slot); }

 private:
  uint64_t* at(uint64_t offset) { return reinterpret_cast<uint64_t*>(base() + offset); }
  // Reads from the last word to the first, opposite to the writer.
  commwatch::Record copy(uint64_t from, uint64_t slot) {
    uint64_t* place = at(from + slot * commwatch::format::kRecordSize);
    uint64_t words[8];
    for (int i = 7; i >= 0; --i) words[i] = __atomic_load_n(place + i, __ATOMIC_ACQUIRE);
    commwatch::Record record;
    memcpy(&record, words, sizeof words);
    return record;
  }
  std::vector<uint64_t> words_;
};
