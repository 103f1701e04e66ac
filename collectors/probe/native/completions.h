// Ends of operations that the backend reports itself, with their durations: NCCL since torch 2.15. So no Work is held.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "exposure.h"

namespace commwatch {

// What a backend reports of one operation.
struct Report {
  // When it was over; 0: not yet. Written last.
  std::atomic<uint64_t> end_ns{0};
  // Its duration on the device; -1: not known.
  int64_t took_ns = -1;
};

// Operations whose end a backend will report, by group and the backend's key of the Work.
class Completions {
 public:
  using Key = std::pair<const void*, uint64_t>;

  static Completions& get() {
    static auto* const all = new Completions;  // never destroyed: a watchdog may still report
    return *all;
  }

  std::shared_ptr<Report> expect(Key key) {
    auto report = std::make_shared<Report>();
    const std::lock_guard<std::mutex> lock(mutex_);
    expected_.insert_or_assign(key, report);
    if (expected_.size() > kMost) expected_.erase(expected_.begin());
    return report;
  }

  // Called by the backend, in any thread, with its locks held.
  void over(Key key, std::optional<float> duration_ms) {
    const uint64_t now = now_ns();
    std::shared_ptr<Report> report;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = expected_.find(key);
      if (found == expected_.end()) return;
      report = std::move(found->second);
      expected_.erase(found);
    }
    const float ms = duration_ms.value_or(-1);
    if (std::isfinite(ms) && ms >= 0) report->took_ns = static_cast<int64_t>(ms * 1e6);
    report->end_ns.store(now);
  }

 private:
  // Operations that failed are never reported.
  static constexpr size_t kMost = 8192;

  std::mutex mutex_;
  std::map<Key, std::shared_ptr<Report>> expected_;
};

// Ask the backend of a group to report. Returns false if it does not.
template <class Backend>
bool reports_completions(const void* group, Backend& backend) {
  if constexpr (requires { backend.supportsCompletionHooks(); }) {
    constexpr int64_t kOurs = 0x636F6D6D77;  // other users of the hooks count from 0
    if (!backend.supportsCompletionHooks()) return false;
    backend.registerCompletionHook(kOurs, [group](const auto& args) { Completions::get().over({group, args.completionKey}, args.duration_ms); });
    return true;
  } else {
    return false;
  }
}

// What the group's backend will report of this operation; null: nothing.
template <class Work>
std::shared_ptr<Report> expected_of(const void* group, Work& work) {
  if constexpr (requires { work.getCompletionKey(); }) {
    const Completions::Key key{group, work.getCompletionKey()};
    auto report = Completions::get().expect(key);
    if (!work.isCompleted() || !work.isSuccess()) return report;
    std::optional<float> duration_ms;  // it was over before it was expected
    try {
      duration_ms = work.getDuration();
    } catch (const std::exception&) {
    }
    Completions::get().over(key, duration_ms);
    return report;
  } else {
    return nullptr;
  }
}

}  // namespace commwatch
