// Tests the measurement of a stream's waits, on a CUDA runtime of our own: a stream is a list of events with times.
#include "stream_waits.h"

#include <mutex>
#include <vector>

#include "check.h"

namespace {

using namespace commwatch;

struct Event {
  double at_ms = -1;  // when it was recorded
};

std::atomic<double> clock_ms{0};
std::atomic<bool> busy{false};      // events are not over
std::atomic<bool> capture{false};   // the stream is being captured
std::atomic<int> failing{0};        // calls of `record` return this
std::atomic<int> alive{0}, cleared{0};

int create(void** event, unsigned) {
  ++alive;
  *event = new Event;
  return 0;
}
int destroy(void* event) {
  --alive;
  delete static_cast<Event*>(event);
  return 0;
}
int record(void* event, void*) {
  if (failing != 0) return failing;
  static_cast<Event*>(event)->at_ms = clock_ms;
  return 0;
}
int record_with(void* event, void* stream, unsigned) { return record(event, stream); }
int query(void*) { return busy ? CudaEvents::kNotReady : 0; }
int elapsed(float* ms, void* begin, void* end) {
  *ms = static_cast<float>(static_cast<Event*>(end)->at_ms - static_cast<Event*>(begin)->at_ms);
  return 0;
}
int wait(void*, void*, unsigned) { return 0; }
int capturing(void*, int* status) {
  *status = capture ? 1 : 0;
  return 0;
}
int last_error() {
  ++cleared;
  return 0;
}

const CudaEvents kCuda{create, destroy, record, record_with, query, elapsed, wait, capturing, last_error};
Handles& handles() {
  static auto* const all = new Handles;
  return *all;
}
char streams[4], events[4096];
void* const compute = &streams[0];
void* const comm = &streams[1];
void* const copies = &streams[2];
void* const other = &streams[3];

// Wait for an event that was recorded on `from`, for so long. Returns whether the wait is measured.
bool waits(StreamWaits& all, void* from, void* event, bool in_operation, double ms) {
  all.recorded(event, from, in_operation);
  if (!all.counts(compute, event)) return false;
  const auto measured = all.begins(compute);
  if (!measured) return false;
  clock_ms = clock_ms + ms;
  if (!all.ends(*measured, compute)) return false;
  busy = true;
  const bool early = all.look(*measured);
  busy = false;
  return !early && all.look(*measured);
}

void test_which_waits_count() {
  StreamWaits all;
  CHECK(!waits(all, other, &events[0], false, 1) && all.take() == StreamWaits::kUnknown, "stream_waits: before the begin nothing is known");
  all.begin(kCuda, handles());
  all.compute_on(compute);
  CHECK(all.take() == 0, "stream_waits: nothing has waited yet");
  CHECK(!waits(all, comm, &events[1], false, 1), "stream_waits: a stream is not one of communication before an operation used it");
  CHECK(waits(all, comm, &events[2], true, 3), "stream_waits: an operation used it");
  CHECK(waits(all, comm, &events[3], false, 4), "stream_waits: then its other events count, too");
  CHECK(!waits(all, other, &events[3], false, 5), "stream_waits: an event that is recorded on another stream counts no longer");
  CHECK(!waits(all, compute, &events[4], true, 5), "stream_waits: the compute stream does not wait for itself");
  all.recorded(&events[5], comm, false);
  CHECK(!all.counts(copies, &events[5]), "stream_waits: the waits of other streams do not count");
  capture = true;
  CHECK(!all.counts(compute, &events[5]), "stream_waits: nothing is measured in a capture");
  capture = false;
  all.add(2);
  CHECK(all.take() == 9'000'000 && all.take() == 0, "stream_waits: waits and operations on the compute stream are added up");
  all.compute_on(comm);
  all.recorded(&events[5], comm, true);
  CHECK(!all.counts(comm, &events[5]), "stream_waits: a stream that computes is none of communication");
}

void test_what_is_not_known() {
  StreamWaits all;
  all.begin(kCuda, handles());
  all.compute_on(compute);
  CHECK(waits(all, comm, &events[0], true, 3), "stream_waits: measured");
  all.missed();
  CHECK(all.take() == StreamWaits::kUnknown && all.take() == 0, "stream_waits: something was missed, once");
  all.add(NAN);
  CHECK(all.take() == StreamWaits::kUnknown, "stream_waits: a time that is not known");
  const int before = cleared;
  failing = 719;
  CHECK(!waits(all, comm, &events[0], true, 3) && cleared > before, "stream_waits: an error is cleared");
  failing = 0;
  CHECK(!waits(all, comm, &events[0], true, 3) && all.take() == StreamWaits::kUnknown, "stream_waits: after an error nothing is measured any more");
}

void test_bounds() {
  const int before = alive;
  {
    StreamWaits all;
    all.begin(kCuda, handles());
    std::vector<std::unique_ptr<StreamWaits::Wait>> pending;
    while (auto wait = all.begins(compute)) pending.push_back(std::move(wait));
    CHECK(pending.size() == 4096 && all.take() == StreamWaits::kUnknown, "stream_waits: only so many are pending");
    pending.clear();
    CHECK(all.begins(compute) != nullptr, "stream_waits: then there is room again");
  }
  CHECK(alive - before <= 512, "stream_waits: few events are kept");
}

void test_stream_waits_in_threads() {
  StreamWaits all;
  all.begin(kCuda, handles());
  all.compute_on(compute);
  std::atomic<int> measured{0};
  in_threads(kThreads, [&](int thread) {
    for (int i = 0; i < 2000; ++i) {
      void* const event = &events[(thread * 2000 + i) % 256 * 16];
      all.recorded(event, i % 3 == 0 ? copies : comm, i % 3 != 0);
      if (!all.counts(compute, event)) continue;
      const auto wait = all.begins(compute);
      if (wait && all.ends(*wait, compute) && all.look(*wait)) ++measured;
      all.add(0.001);
    }
  });
  CHECK(measured > 0 && all.take() >= 0, "stream_waits: threads measure beside each other");
}

}  // namespace

void test_stream_waits() {
  test_which_waits_count();
  test_what_is_not_known();
  test_bounds();
  test_stream_waits_in_threads();
}
