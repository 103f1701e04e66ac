// Tests what threads share without a lock: ring, table of operations in flight, exposure, small maps.
#include <condition_variable>
#include <mutex>

#include "check.h"
#include "exposure.h"
#include "flight.h"
#include "ring.h"

namespace {

using namespace commwatch;

// -- ring: eight writers, many laps, a reader beside them

constexpr uint64_t kSlots = 256;
constexpr uint32_t kRecords = 16000;  // of each writer: 500 laps
// What a writer stores, without atomics, before its record: a reader that sees the record must see this.
uint32_t before_record[kThreads][kRecords];

// Checks a record that was read while others write; returns false if its writer was in the middle of it.
bool check_read(const Record& record, uint64_t slot) {
  if (record.stamp != record.stamp2 || record.stamp == 0) return false;
  CHECK((record.stamp - 1) % kSlots == slot, "ring: a record lies in its slot");
  CHECK(record.group < kThreads && record.seq < kRecords && same(record, record_of(record.group, record.seq)),
        "ring: a record with equal stamps is whole");
  CHECK(before_record[record.group][record.seq] == record.seq + 1, "ring: a record shows what was before it");
  return true;
}

void test_ring() {
  Memory memory(kSlots);
  Ring ring(memory.base(), kSlots);
  std::atomic<bool> over{false};
  uint64_t read = 0;
  std::thread reader([&] {
    uint64_t cursor = 0;
    while (!over.load()) {
      const uint64_t now = memory.counter(format::kCursor);
      CHECK(now >= cursor, "ring: the cursor does not go back");
      cursor = now;
      // Being written: the next numbers, in slots that still hold the records of the previous lap.
      for (uint64_t n = cursor; n < cursor + kThreads; ++n) read += check_read(memory.record(n % kSlots), n % kSlots);
    }
  });
  // No writer is overtaken by a lap, as in a ring of usual size: an overtaken writer would leave a torn record.
  constexpr uint32_t kStride = kSlots / 2 / kThreads;
  Meeting lap(kThreads);
  in_threads(kThreads, [&](int writer) {
    for (uint32_t i = 0; i < kRecords; ++i) {
      if (i % kStride == 0) lap.meet();
      before_record[writer][i] = i + 1;
      ring.write(record_of(static_cast<uint16_t>(writer), i));
    }
  });
  over.store(true);
  reader.join();
  constexpr uint64_t kTotal = uint64_t{kThreads} * kRecords;
  CHECK(read > 0, "ring: the reader has seen records");
  CHECK(memory.counter(format::kCursor) == kTotal, "ring: the cursor says how many were written");
  std::vector<int> found(kThreads);
  uint64_t last[kThreads] = {};
  for (uint64_t n = kTotal - kSlots; n < kTotal; ++n) {
    const Record record = memory.record(n % kSlots);
    CHECK(record.stamp == n + 1 && check_read(record, n % kSlots), "ring: the last lap is there, whole");
    CHECK(record.seq + 1 > last[record.group], "ring: the records of one writer keep their order");
    last[record.group] = record.seq + 1;
    ++found[record.group];
  }
  // The last two strides of every writer, which is one lap.
  for (int writer = 0; writer < kThreads; ++writer) {
    CHECK(found[writer] == 2 * kStride && last[writer] == kRecords, "ring: each record is there once");
  }
}

// -- table of operations in flight

void test_in_flight() {
  Memory memory(1);
  Ring ring(memory.base(), 1);
  constexpr uint32_t kRounds = 3000, kHeld = 12;  // 8 x 12 do not fit into 64
  std::atomic<int> owner[format::kInFlightSlots] = {};  // relaxed: the order must come from the table
  int plain[format::kInFlightSlots] = {};  // only its owner may touch it
  std::atomic<uint64_t> refused{0};
  in_threads(kThreads, [&](int thread) {
    for (uint32_t round = 0; round < kRounds; ++round) {
      int held[kHeld];
      for (uint32_t i = 0; i < kHeld; ++i) {
        Record record = record_of(static_cast<uint16_t>(thread), round * kHeld + i);
        record.flags = 0;
        const int slot = held[i] = ring.begin(record);
        if (slot < 0) {
          refused.fetch_add(1);
          ring.blocked(slot, 1);
          continue;
        }
        CHECK(slot < format::kInFlightSlots && owner[slot].exchange(thread + 1, std::memory_order_relaxed) == 0, "in flight: a slot is given once");
        plain[slot] = thread;
        Record found = memory.in_flight(slot);
        CHECK(found.stamp != 0 && found.stamp == found.stamp2 && same(found, record), "in flight: the operation is in its slot");
        ring.blocked(slot, 77);
        found = memory.in_flight(slot);
        CHECK(found.start_ns == 77 && found.flags == format::kBlocked, "in flight: a blocked thread shows");
        ring.blocked(slot, 0);
        found = memory.in_flight(slot);
        record.start_ns = 0;
        CHECK(same(found, record), "in flight: a thread no longer blocked leaves nothing behind");
      }
      for (const int slot : held) {
        if (slot >= 0) CHECK(plain[slot] == thread && owner[slot].exchange(0, std::memory_order_relaxed) == thread + 1, "in flight: a slot has one owner");
        ring.end(slot);
      }
    }
  });
  CHECK(ring.in_flight_now() == 0, "in flight: nothing at the end");
  for (int slot = 0; slot < format::kInFlightSlots; ++slot) {
    CHECK(memory.in_flight(slot).stamp == 0, "in flight: a free slot has no stamp");
  }
  CHECK(memory.counter(format::kOpsStarted) == uint64_t{kThreads} * kRounds * kHeld, "in flight: all are counted");
  CHECK(memory.counter(format::kInFlightOverflow) == refused.load(), "in flight: what found no slot is counted");
  for (int i = 0; i < format::kInFlightSlots; ++i) CHECK(ring.begin(Record{}) >= 0, "in flight: all slots can be had");
  CHECK(ring.begin(Record{}) == -1, "in flight: a full table says so");
}

// -- exposure

// An idle thread, so that its CPU clock does not advance.
class Idle {
 public:
  Idle() : thread_([this] {
      std::unique_lock<std::mutex> lock(mutex_);
      leave_.wait(lock, [this] { return over_; });
    }) {
    pthread_getcpuclockid(thread_.native_handle(), &clock);
    for (uint64_t before = ~uint64_t{0}; before != clock_ns(clock);) {
      before = clock_ns(clock);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }
  ~Idle() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      over_ = true;
    }
    leave_.notify_one();
    thread_.join();
  }
  clockid_t clock{};

 private:
  std::mutex mutex_;
  std::condition_variable leave_;
  bool over_ = false;
  std::thread thread_;
};

// From `now` on: the exact result of a schedule of one thread, to the nanosecond.
void check_schedule(Exposure& exposure, uint64_t now) {
  exposure.begin(now + 10 * kMs);
  exposure.begin(now + 20 * kMs);
  exposure.end(now + 30 * kMs);
  exposure.end(now + 60 * kMs);
  exposure.begin(now + 80 * kMs);
  CHECK(exposure.take(now + 100 * kMs) == 70 * static_cast<int64_t>(kMs), "exposure: periods count once, a running one up to now");
  exposure.in_call(now + 100 * kMs, now + 110 * kMs);
  exposure.end(now + 120 * kMs);
  exposure.in_call(now + 130 * kMs, now + 135 * kMs);
  CHECK(exposure.take(now + 200 * kMs) == 25 * static_cast<int64_t>(kMs), "exposure: a call counts where nothing else is in flight");
  CHECK(exposure.take(now + 300 * kMs) == 0, "exposure: nothing in flight, nothing exposed");
}

void test_exposure() {
  const Idle idle, other;
  uint64_t now = now_ns();
  Exposure exposure(idle.clock, now);
  check_schedule(exposure, now);
  exposure.watch(other.clock);
  CHECK(exposure.take(now + 400 * kMs) == Exposure::kUnknown, "exposure: two threads do not compare");
  check_schedule(exposure, now + 400 * kMs);
  // All at one moment: all that is subtracted must be added again.
  Exposure still(idle.clock, now = now_ns());
  in_threads(kThreads, [&](int) {
    for (int i = 0; i < 20000; ++i) {
      still.begin(now);
      still.end(now);
    }
  });
  CHECK(still.take(now) == 0, "exposure: threads lose nothing of the sum");
  Exposure crowded(idle.clock, now = now_ns());
  std::atomic<int> running{kThreads};
  std::thread taker([&] {
    for (uint64_t then = now; running.load() > 0;) {
      const uint64_t at = now_ns();
      const int64_t exposed = crowded.take(at);
      CHECK(exposed == Exposure::kUnknown || exposed >= 0, "exposure: never negative");
      CHECK(exposed <= static_cast<int64_t>(at - then + kMs), "exposure: never longer than the step");
      then = at;
    }
  });
  in_threads(kThreads, [&](int thread) {
    for (int i = 0; i < 20000; ++i) {
      crowded.begin(now_ns());
      if (i % kThreads == thread) crowded.in_call(now_ns(), now_ns());
      crowded.end(now_ns());
    }
    running.fetch_sub(1);
  });
  taker.join();
  now = now_ns();
  crowded.take(now);
  crowded.take(now);  // a sum taken while others ran may not be comparable
  check_schedule(crowded, now);
  crowded.not_known();
  CHECK(crowded.take(now + 400 * kMs) == Exposure::kUnknown, "exposure: where it is not known it is not said");
}

// -- a map for a few keys

void test_few() {
  constexpr int kKeys = 64;
  for (int round = 0; round < 200; ++round) {
    Few<int, std::atomic<int>> few;
    std::vector<std::vector<std::atomic<int>*>> seen(kThreads);
    in_threads(kThreads, [&](int thread) {
      for (int i = 0; i < kKeys; ++i) {
        std::atomic<int>& value = few[(i + thread * (round % 3)) % kKeys];
        value.fetch_add(1);
        seen[thread].push_back(&value);
      }
    });
    for (int key = 0; key < kKeys; ++key) {
      CHECK(few[key].load() == kThreads, "few: one value for a key, whoever was first");
      for (int thread = 0; thread < kThreads; ++thread) {
        CHECK(seen[thread][(key + kKeys * kThreads - thread * (round % 3)) % kKeys] == &few[key], "few: a value stays where it is");
      }
    }
  }
}

}  // namespace

void test_messages();
void test_poller();
void test_session();
void test_graphs();
void test_retention();
void test_spare();
void test_standard_error();
void test_stream_waits();
void test_aside();

int main(int argc, char** argv) {
  const struct {
    const char* name;
    void (*test)();
  } tests[] = {{"ring", test_ring}, {"in_flight", test_in_flight}, {"exposure", test_exposure},
               {"few", test_few},   {"messages", test_messages},   {"poller", test_poller},       {"session", test_session},
               {"graphs", test_graphs}, {"retention", test_retention}, {"spare", test_spare}, {"stream_waits", test_stream_waits},
               {"standard_error", test_standard_error},
               {"aside", test_aside}};
  for (const auto& [name, test] : tests) {
    if (argc > 1 && strcmp(argv[1], name) != 0) continue;
    test();
    printf("%s ok\n", name);
  }
}
