// What the backend of a process group does on devices.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

#include "device.h"
#include "groups.h"

namespace commwatch {

// Whether blocking collectives run on the current stream, though they have a Work. Its duration includes the wait for the group's earlier
// operations on other streams. With the older backend, they have no Work since torch 2.8, and ran on NCCL's stream before.
inline bool blocks_here(const c10d::Backend& backend) {
  const std::string name = backend.getBackendName();
  return name == "nccl2" || name == "nccl-lazy";
}

// Enable timing in the Works of this group. The events that a Work uses are chosen here, once, before the first Work.
inline void have_times(Group& group, c10d::ProcessGroup& process_group, const c10::Device& device) {
  if (device_timing().load() != DeviceTiming::kEvents || group.times_asked.exchange(true)) return;
  try {
    const auto backend = process_group.getBackend(device.type());
    group.blocks_here.store(blocks_here(*backend));
    backend->enableCollectivesTiming();
  } catch (const std::exception&) {
    group.without_times.store(true);
  }
}

// What the Work of an operation tells. A batch has one Work for all its operations, and NCCL begins it after the last one.
inline OwnTimes own_times_of(const Group& group, bool has_work, bool in_batch) {
  if (!has_work) return OwnTimes::kNone;
  return group.knows_starts.load(std::memory_order_relaxed) && !in_batch ? OwnTimes::kStartAndDuration : OwnTimes::kDuration;
}

// How an operation is timed.
inline DeviceTiming timing_of(const Group& group, OwnTimes own_times) {
  const DeviceTiming timing = device_timing().load();
  return timing == DeviceTiming::kEvents && own_times != OwnTimes::kNone && group.without_times.load() ? DeviceTiming::kPoll : timing;
}

}  // namespace commwatch
