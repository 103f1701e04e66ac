// Finds when operations on a GPU begin and end by querying events, never by waiting for the device.
//
// Works on any device with c10's streams and events and the functions of runtime.h.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "device_events.h"
#include "flight.h"
#include "nccl_errors.h"
#include "nccl_plugin.h"
#include "retention.h"
#include "runtime.h"
#include "stream_waits.h"
#include "work_start.h"

namespace commwatch {

// Numbers as in torch_timing.py.
enum class DeviceTiming : int { kOff, kPoll, kEvents };

// How operations on devices are timed in this process; kOff once timing has failed.
inline std::atomic<DeviceTiming>& device_timing() {
  static std::atomic<DeviceTiming> timing{DeviceTiming::kOff};
  return timing;
}

// Whether a call of a device has failed.
inline std::atomic<bool>& device_failed() {
  static std::atomic<bool> failed{false};
  return failed;
}

// The device's answers make no sense.
struct WrongClock : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Time no device from now on.
inline void leave_devices_alone(const char* why) {
  if (device_timing().exchange(DeviceTiming::kOff) != DeviceTiming::kOff) Session::say("operations on GPUs are no longer timed", "asking", why);
}

// Number of a line of the poller: operations on one queue, which end in order. part: of the queue.
inline uint64_t line_of(const void* queue, int64_t part) {
  const auto mixed = (reinterpret_cast<uint64_t>(queue) >> 4) * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(part);
  return std::max<uint64_t>(mixed >> 1, 1);
}

// Make a device current in a thread of ours; otherwise a query would initialize the first device.
inline void use_in_this_thread(const c10::Device& device) {
  static thread_local c10::DeviceIndex on = -1;
  if (on == device.index()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  guard.setDevice(device);
  TORCH_CHECK(Runtime::get().step_aside(), "the CUDA runtime cannot exempt this thread from graph captures");
  on = device.index();
}

// A call of a device failed: time no device from now on, and destroy no Work.
inline void device_fails(const char* why) {
  device_failed().store(true);
  leave_devices_alone(why);
}

// Whether the current stream of this device is being captured into a graph; false if unknown.
inline bool is_capturing(const c10::Device& device) {
  const c10::impl::VirtualGuardImpl guard(device.type());
  void* handle = nullptr;
  return guard.getDevice() == device && Runtime::get().capturing(guard.getStream(device), &handle).value_or(false);
}

// The outputs of an operation, which do not keep their memory.
using Outputs = c10::SmallVector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>, 2>;

// The operations of a Work: one, or those of a batch.
using Flights = c10::SmallVector<std::shared_ptr<Flight>, 1>;

inline void add_outputs(const c10::IValue& value, Outputs* outputs) {
  if (value.isList()) {
    for (const c10::IValue& part : value.toListRef()) add_outputs(part, outputs);
  } else if (value.isTensor() && value.toTensor().defined()) {
    outputs->emplace_back(value.toTensor().getIntrusivePtr());
  }
}

// What is recorded about one operation at its launch.
struct OnDevice {
  c10::Device device;
  DeviceTiming timing = DeviceTiming::kOff;
  // Of the poller, if the operation has a Work.
  uint64_t line = 0;
  // Recorded on the stream that was current at the launch: complete once the operation's inputs are ready and earlier work is over. Null if
  // the operation's Work knows that.
  Events::Event ready;
  // The first of its queue: it also makes the communicator, or its connections, so its time is not that of an operation.
  bool first = false;
  // A replay of a graph, of which NCCL may tell the times of each operation.
  bool replay = false;
  // What its Work holds, if it has one.
  Outputs outputs;
  // Null for a replay, which may have operations of several groups.
  Group* group = nullptr;
  // It runs on the current stream; its Work is not needed.
  bool here = false;
  // Where its time on the device counts as a wait of the compute stream, on which it runs.
  StreamWaits* waits = nullptr;
};

// Whether, and how, the Work of an operation tells its times.
enum class OwnTimes { kNone, kDuration, kStartAndDuration };

// Called before the operation, which is the next of its `line`.
inline OnDevice launch_on(const c10::Device& device, DeviceTiming timing, OwnTimes own_times, uint64_t line, bool first) {
  OnDevice noted{device, timing, line, nullptr, first};
  if (noted.timing == DeviceTiming::kOff) return noted;
  try {
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Stream stream = guard.getStream(device);
    void* handle = nullptr;
    // An event on another device than the thread's current one would initialize that device as a side effect.
    if (guard.getDevice() != device || Runtime::get().capturing(stream, &handle).value_or(true)) {
      noted.timing = DeviceTiming::kOff;
    } else if (own_times != OwnTimes::kStartAndDuration) {
      noted.ready = Events::record(stream, handle, noted.timing == DeviceTiming::kEvents && own_times == OwnTimes::kNone);
    }
  } catch (const std::exception& error) {
    device_fails(error.what());
    noted.timing = DeviceTiming::kOff;
  }
  return noted;
}

// Watches operations on a device until they are over: one, or all of a batch, which begin and end together.
class DeviceWatch : public Watch {
 public:
  using Works = c10::intrusive_ptr<c10d::Work>;

  // Called after the operation, in its thread. work: null if the operation runs on the current stream, as blocking ones do
  // on NCCL since torch 2.8.
  DeviceWatch(OnDevice&& noted, Works work, Flights&& flights)
      : noted_(std::move(noted)), work_(std::move(work)), flights_(std::move(flights)) {
    if (work_) {
      noted_.waits = nullptr;  // a stream that waits for a Work is seen to wait
      return;
    }
    const c10::impl::VirtualGuardImpl guard(noted_.device.type());
    const c10::Stream stream = guard.getStream(noted_.device);
    void* handle = nullptr;
    TORCH_CHECK(Runtime::handle_of(stream, &handle, 0), "the stream's handle is unknown");
    over_ = Events::record(stream, handle, timed());
    if (timed() && noted_.group != nullptr) {
      before_ = std::static_pointer_cast<Events::Node>(std::atomic_exchange(&noted_.group->latest_over, std::shared_ptr<void>(over_)));
    }
    noted_.line = line_of(nullptr, static_cast<int64_t>(std::hash<c10::Stream>()(stream)));
  }

  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  ~DeviceWatch() override { drop_work(); }

  // Line of the poller that it belongs to.
  uint64_t line() const { return noted_.line; }

  // Whether it holds a Work.
  bool holds() const { return static_cast<bool>(work_); }

  // Called in the poller's thread; returns true once there is nothing left to watch.
  bool look() {
    try {
      if (device_timing().load() == DeviceTiming::kOff || flights_.empty() || (work_ && !may_ask(*work_))) return true;
      use_in_this_thread(noted_.device);
      return looked();
    } catch (const WrongClock& error) {
      leave_devices_alone(error.what());
    } catch (const std::exception& error) {
      device_fails(error.what());
    } catch (...) {
      device_fails("unknown exception");
    }
    return true;
  }

  // Called in the poller's thread, as is the next one.
  uint64_t kept_bytes() const override {
    if (!work_ || work_.use_count() > 1) return 0;
    uint64_t bytes = 0;
    for (const auto& output : noted_.outputs) {
      const auto tensor = output.lock();
      // References: ours, the Work's, and one of the Python object, which in newer torch lives as long as the tensor. So a tensor that
      // only one Python object holds counts, too.
      const bool alone = tensor.defined() && tensor.use_count() <= 3 && tensor->has_storage() && tensor->storage().use_count() == 1;
      if (alone) bytes += tensor->storage().nbytes();
    }
    return bytes;
  }

  void let_go() override {
    drop_work();
    flights_.clear();
  }

 private:
  // The destructor of a Work may call the device. If that fails, it ends the process, so a Work is not destroyed after a failure.
  void drop_work() {
    if (device_failed().load()) {
      (void)work_.release();
    } else {
      work_.reset();
    }
  }

  // Whether the poller may ask a Work of this type whether it is over; if not, its operation has no duration. Works of other types may forward to
  // one of NCCL's.
  static bool may_ask(const c10d::Work& work) {
    static thread_local const bool not_asked = NcclErrors::not_asked_here();
    if (not_asked || std::string(typeid(work).name()).find("NCCL") == std::string::npos) return true;
    static std::once_flag said;
    std::call_once(said, [] { Session::say("asynchronous operations have no durations", "timing them", "PyTorch's calls of NCCL cannot be replaced"); });
    return false;
  }

  bool timed() const { return noted_.timing == DeviceTiming::kEvents; }

  // A thread of NCCL's reports the times of an operation that is over within this time, or not at all.
  static constexpr uint64_t kReportedWithinNs = 20'000'000;
  static constexpr int kMostLate = 64;
  static constexpr uint64_t kLongReplayNs = 1'000'000'000, kUnknownReplayNs = 8'000'000'000;
  // Largest error of the distance between the GPU's clock and ours.
  static constexpr uint64_t kClocksDifferNs = 1'000'000;
  // By so much may a kernel's time by NCCL and by events differ.
  static constexpr int64_t kEventsDifferNs = 50'000;

  bool looked() {
    if (!next_) {
      next_ = true;
      for (auto& flight : flights_) {
        if (!noted_.replay) flight->is_next();
      }
    }
    const bool is_over = over_ns_ != 0 || (!work_ && over_->is_over());
    if (!reached_ && !has_reached(is_over)) return false;
    if (over_ns_ == 0) {
      if (work_ ? !work_->isCompleted() : !is_over) {
        seen_running_ = true;
        if (noted_.replay) show_running(now_ns());
        return false;
      }
      over_ns_ = now_ns();  // not before the query, which may wait for a lock of the backend
    }
    const uint8_t failed = work_ && work_->exception() ? format::kFailed : 0;
    if (failed == 0 && !reported()) return false;
    const bool between_events = over_ && timed() && noted_.ready;
    const double whole_ms = between_events ? over_->ms_since(*noted_.ready) : -1;
    if (noted_.waits != nullptr) noted_.waits->add(noted_.first ? -1 : whole_ms);
    const int64_t took_ns = timed() ? duration_ns(whole_ms) : -1;
    if (failed == 0) finish_by_nccl(took_ns);
    if (failed != 0 || (!timed() && seen_running_ && is_one())) {
      for (auto& flight : flights_) flight->finish(over_ns_, format::kByPoll, failed, began_ns_);
      return true;
    }
    if (took_ns < 0 || !is_one()) return true;  // the flight's destructor finishes it without a duration
    check(took_ns, over_ns_ - flights_.front()->launched_ns());
    for (auto& flight : flights_) flight->finish(over_ns_, format::kByEvents, 0, over_ns_ - static_cast<uint64_t>(took_ns), true);
    return true;
  }

  // Whether the events are around operations that run as one.
  bool is_one() const { return !noted_.first && !noted_.replay; }

  // A replay takes long: show which operations the GPU has reached. If NCCL reports none, they are recorded without times, so that a rank that has not
  // launched them is known to be behind.
  void show_running(uint64_t now) {
    if (now - reached_ns_ < kLongReplayNs || now - shown_ns_ < kLongReplayNs / 10) return;
    shown_ns_ = now;
    bool reported = false;
    for (auto& flight : flights_) {
      commwatch_nccl_times times;
      const commwatch_nccl_state state = NcclPlugin::times(flight->nccl_call(), &times);
      reported |= state != kCallUnknown;
      if (state == kCallOver) {
        flight->left();
      } else if (state == kCallPending && times.begin_ns != 0) {
        flight->is_next();
        flight->reached(times.begin_ns);
      }
    }
    if (!reported && now - reached_ns_ > kUnknownReplayNs) flights_.clear();
  }

  // The operations are over. Returns false while NCCL may still report the times of some.
  bool reported() const {
    // After so many reports that were late, with none in time between them, none is waited for: the operations behind this one wait, too.
    static std::atomic<int> late{0};
    bool pending = false, over = false;
    for (const auto& flight : flights_) {
      commwatch_nccl_times times;
      const commwatch_nccl_state state = NcclPlugin::times(flight->nccl_call(), &times);
      pending |= state == kCallPending;
      over |= state == kCallOver;
    }
    if (!pending) {
      if (over) late.store(0, std::memory_order_relaxed);
      return true;
    }
    if (late.load(std::memory_order_relaxed) >= kMostLate) return true;
    if (now_ns() - over_ns_ < kReportedWithinNs) return false;
    late.fetch_add(1, std::memory_order_relaxed);
    return true;
  }

  // Finish the operations whose times NCCL knows. took_ns: by events around them, -1 if unknown. A kernel cannot take longer: then the times are
  // those of other operations.
  void finish_by_nccl(int64_t took_ns) {
    for (auto& flight : flights_) {
      commwatch_nccl_times times;
      if (NcclPlugin::times(flight->nccl_call(), &times) != kCallOver) continue;
      // NCCL keeps the times of 64 operations of a channel. A thread of NCCL's that is later than that reports those of a later one.
      if (times.end_ns > over_ns_ + kClocksDifferNs) continue;
      // Times of an earlier replay: the graph was also replayed where we cannot see it.
      if (times.begin_ns + kClocksDifferNs < flight->launched_ns()) continue;
      const auto ran_ns = static_cast<int64_t>(times.end_ns - times.begin_ns);
      const int64_t may_differ_ns = took_ns / 20 + kEventsDifferNs;
      if ((times.choice & kUncertain) != 0 && (took_ns < 0 || std::abs(ran_ns - took_ns) > may_differ_ns)) continue;
      if (took_ns >= 0 && ran_ns > took_ns + may_differ_ns) {
        const std::string ran = std::to_string(ran_ns / 1000), took = std::to_string(took_ns / 1000);
        NcclPlugin::leave();
        return Session::say("NCCL's times are no longer used", "asking", ("a kernel of " + ran + " µs in an operation of " + took + " µs").c_str());
      }
      times.choice &= ~kUncertain;
      flight->finish_by_nccl(times);
    }
  }

  // Returns whether the device has reached the operations. Until then, they cannot be over. is_over: they are known to be over.
  bool has_reached(bool is_over) {
    if (!is_over && !is_ready()) {
      not_ready_ = true;
      return false;
    }
    reached_ = true;
    const uint64_t now = now_ns();
    if (not_ready_) began_ns_ = now;  // the begin was observed
    reached_ns_ = now;
    for (auto& flight : flights_) {
      if (!noted_.replay) flight->reached(now);
    }
    if (!over_) noted_.ready.reset();  // with `over_`, it is the begin of the duration
    return true;
  }

  bool is_ready() const {
    if (noted_.ready) return noted_.ready->event.query();
    if (!work_) return false;
    if (WorkStart::known_to(*work_) && WorkStart::seen(*work_)) return true;
    return work_->isCompleted() && !work_->exception();  // one that failed may not have been reached
  }

  // The events of an operation lie within its time on the host. If their distance does not, they do not measure it.
  static void check(int64_t took_ns, uint64_t at_most_ns) {
    const bool plausible = took_ns <= 0 || static_cast<uint64_t>(took_ns) <= at_most_ns + at_most_ns / 100 + 100'000;
    if (plausible) return;
    const std::string took = std::to_string(took_ns / 1000), most = std::to_string(at_most_ns / 1000);
    throw WrongClock("its clock measured " + took + " µs for an operation of at most " + most + " µs");
  }

  // Duration in ns by the device's own clock; -1: unknown. whole_ms: between the events around the operation, if there are such.
  int64_t duration_ns(double whole_ms) const {
    double ms = whole_ms;
    if (!work_) {
      // NCCL runs the operations of a group one after another, on whatever streams they are: FSDP has two.
      if (before_ && before_->event.device() == over_->event.device() && before_->is_over()) ms = std::min(ms, over_->ms_since(*before_));
    } else if (noted_.group != nullptr && !noted_.group->without_times.load()) {
      try {
        ms = work_->getDuration();
        if (!noted_.group->knows_starts.load()) noted_.group->knows_starts.store(WorkStart::known_to(*work_) && WorkStart::seen(*work_));
      } catch (const std::exception&) {  // the Works of this backend have none, or their timing is not enabled
        noted_.group->without_times.store(true);
      }
    }
    return std::isfinite(ms) && ms >= 0 ? static_cast<int64_t>(ms * 1e6) : -1;
  }

  OnDevice noted_;
  Works work_;
  std::shared_ptr<Events::Node> over_;
  std::shared_ptr<Events::Node> before_;  // that of the group's operation before it
  Flights flights_;
  bool next_ = false;  // it is the first of its line
  bool reached_ = false;
  uint64_t reached_ns_ = 0, shown_ns_ = 0;
  bool not_ready_ = false;
  bool seen_running_ = false;  // by an earlier poll, so that begin and end are known to the interval of the polls
  uint64_t began_ns_ = 0;
  uint64_t over_ns_ = 0;  // when it was seen to be over
};

// What the poller has of an operation on a device.
struct LookAt {
  Session& session;
  std::shared_ptr<DeviceWatch> watch;

  bool operator()() const { return watch->look(); }

  void arrives() const {
    if (watch->holds() && session.retention.add(watch)) session.poller().add([&s = session] { return s.retention.check(now_ns()); });
  }
};

// This thread will soon look after an operation.
[[gnu::always_inline]] inline void fetch_watch() {
  SpareMemory<DeviceWatch>::fetch();
  Poller::fetch<LookAt>();
}

inline void look_after(Session& session, OnDevice&& noted, c10::intrusive_ptr<c10d::Work> work, Flights&& flights) {
  try {
    if (noted.here) work.reset();
    const bool by_events = noted.timing == DeviceTiming::kEvents;
    auto watch = std::allocate_shared<DeviceWatch>(SpareMemory<DeviceWatch>(), std::move(noted), std::move(work), std::move(flights));
    const uint64_t line = watch->line();
    session.poller().add(LookAt{session, std::move(watch)}, line, by_events);
  } catch (const std::exception& error) {
    device_fails(error.what());
  }
}

}  // namespace commwatch
