// Tests the ends that a backend reports, with a backend of its own.
#include "completions.h"

#include <functional>
#include <stdexcept>

#include "check.h"

namespace {

using namespace commwatch;

struct Args {
  uint64_t completionKey;
  std::optional<float> duration_ms;
};

struct Reporting {
  bool supportsCompletionHooks() const { return supports; }
  void registerCompletionHook(int64_t, std::function<void(const Args&)> given) { hook = std::move(given); }
  bool supports = true;
  std::function<void(const Args&)> hook;
};

struct Silent {};

struct Work {
  uint64_t getCompletionKey() const { return key; }
  bool isCompleted() const { return completed; }
  bool isSuccess() const { return !failed; }
  float getDuration() const {
    if (!timed) throw std::runtime_error("not timed");
    return 2.5f;
  }
  uint64_t key;
  bool completed = false, failed = false, timed = true;
};

void test_reports() {
  const int group = 0, other = 0;
  Reporting backend;
  CHECK(reports_completions(&group, backend) && backend.hook, "completions: a backend that reports is asked to");
  Work work{7};
  const auto report = expected_of(&group, work);
  CHECK(report && report->end_ns.load() == 0, "completions: an operation that runs has no end");
  const auto same_key = expected_of(&other, work);
  backend.hook(Args{8, 1.0f});
  CHECK(report->end_ns.load() == 0, "completions: the end of an unknown operation changes nothing");
  backend.hook(Args{7, 1.5f});
  CHECK(report->end_ns.load() > 0 && report->took_ns == 1'500'000, "completions: an end has its time and its duration");
  CHECK(same_key->end_ns.load() == 0, "completions: operations of another group with an equal key are kept apart");
  const uint64_t end_ns = report->end_ns.load();
  backend.hook(Args{7, 9.0f});
  CHECK(report->end_ns.load() == end_ns && report->took_ns == 1'500'000, "completions: an end is reported once");
}

void test_unknown_durations() {
  const int group = 0;
  Reporting backend;
  reports_completions(&group, backend);
  Work work{1};
  const auto report = expected_of(&group, work);
  backend.hook(Args{1, std::nullopt});
  CHECK(report->end_ns.load() > 0 && report->took_ns == -1, "completions: a duration that is not reported is not known");
}

void test_over_before_it_is_expected() {
  const int group = 0;
  Work timed{1, true}, untimed{2, true, false, false}, failed{3, true, true};
  const auto over = expected_of(&group, timed);
  CHECK(over->end_ns.load() > 0 && over->took_ns == 2'500'000, "completions: an operation that is over by then is asked itself");
  const auto unknown = expected_of(&group, untimed);
  CHECK(unknown->end_ns.load() > 0 && unknown->took_ns == -1, "completions: also if it is not timed");
  CHECK(expected_of(&group, failed)->end_ns.load() == 0, "completions: an operation that failed has no end");
}

void test_no_reports() {
  const int group = 0;
  Silent silent;
  Reporting refuses;
  refuses.supports = false;
  CHECK(!reports_completions(&group, silent), "completions: a backend without hooks does not report");
  CHECK(!reports_completions(&group, refuses) && !refuses.hook, "completions: nor does one that does not support them");
  CHECK(expected_of(&group, silent) == nullptr, "completions: without keys nothing is expected");
}

void test_completions_in_threads() {
  constexpr uint64_t kEach = 500;
  const int group = 0;
  Reporting backend;
  reports_completions(&group, backend);
  std::atomic<uint64_t> ended{0};
  in_threads(kThreads, [&](int thread) {
    for (uint64_t i = 0; i < kEach; ++i) {
      Work work{static_cast<uint64_t>(thread) << 32 | i};
      const auto report = expected_of(&group, work);
      std::thread([&] { backend.hook(Args{work.key, 1.0f}); }).join();
      ended.fetch_add(report->end_ns.load() > 0);
    }
  });
  CHECK(ended.load() == kThreads * kEach, "completions: threads expect and report at once");
}

}  // namespace

void test_completions() {
  test_reports();
  test_unknown_durations();
  test_over_before_it_is_expected();
  test_no_reports();
  test_completions_in_threads();
}
