// The operations of a replay of a CUDA graph. NCCL tells their times to our plugin; without it they are unknown.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>

#include "device.h"

namespace commwatch {

// The replay that begins in this thread, until it has been launched.
class Replay {
 public:
  // Number and record all operations of the graph, those with times once they are over.
  static void begins(Session& session, uint64_t graph) {
    current().reset();  // of an earlier one that was not launched, as it raised
    Replay replay(session);
    session.graphs.each(graph, [&](const Captured& operation) { replay.add(operation); });
    if (!replay.flights_.empty()) current() = std::move(replay);
  }

  // session: null once there is none.
  static void launched(Session* session) {
    std::optional<Replay> replay = std::exchange(current(), std::nullopt);
    if (session == nullptr || !replay || replay->session_ != session) return;  // another: its replay was not launched
    const Cost cost(*session, Cost::due());
    look_after(*session, std::move(*replay->noted_), nullptr, std::move(replay->flights_));
  }

 private:
  // Most operations on devices that have not ended, for a replay whose times are waited for.
  static constexpr uint32_t kMostQueued = 1 << 14;

  explicit Replay(Session& session) : session_(&session) {}

  static std::optional<Replay>& current() {
    static thread_local std::optional<Replay> replay;
    return replay;
  }

  void add(const Captured& operation) {
    Group* const group = session_->find(operation.group, operation.name);
    if (group == nullptr) return;  // destroyed, and with it the graph's communicator
    Record record = operation.record;
    record.launch_ns = record.start_ns = record.end_ns = now_;
    Queue& queue = numbered(*group, operation.p2p, &record);
    if (!records(*session_, *group, queue, operation.p2p, record)) return;
    session_->waits.missed();
    if (operation.nccl_call != 0 && is_watched()) {
      auto flight = std::allocate_shared<Flight>(SpareMemory<Flight>(), *session_, queue, operation.p2p, false, 0, record);
      flight->within(commwatch_nccl_replay(operation.nccl_call, operation.replays));
      flights_.push_back(std::move(flight));
      return;
    }
    record.flags |= format::kUntimed;
    record.timing = format::kByNone;
    session_->ring()->write(record);
  }

  // Whether the end of the replay will be seen.
  bool is_watched() {
    if (!noted_) {
      const bool room = session_->queued.load(std::memory_order_relaxed) < kMostQueued;
      const auto device = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice();
      // The events are around all operations of the graph.
      noted_ = launch_on(device, room ? device_timing().load() : DeviceTiming::kOff, OwnTimes::kNone, 0, false);
      noted_->replay = true;
    }
    return noted_->timing != DeviceTiming::kOff;
  }

  Session* session_;
  uint64_t now_ = now_ns();
  std::optional<OnDevice> noted_;
  Flights flights_;
};

}  // namespace commwatch
