// Checksums of what a collective of Gloo has given and received: of its inputs at the launch, of its outputs before its end is visible.
//
// Other backends are left out: that their results have equal bits on all ranks, and that their outputs are complete before a callback of the future, is
// not proven (docs/corruption.md).
#pragma once

#include <ATen/core/ivalue.h>
#include <stdlib.h>
#include <string.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "checks.h"
#include "ending.h"

namespace commwatch {

inline bool can_be_summed(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && tensor.is_cpu() && tensor.is_contiguous();
}

// Size of a number in bytes: of a complex element, of either part. Gloo's outputs may be views with real elements.
inline size_t number_size(const at::Tensor& tensor) { return c10::elementSize(c10::toRealValueType(tensor.scalar_type())); }

inline Sums sums_of(const at::Tensor& tensor) {
  return checksum(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes(), number_size(tensor));
}

// The sums of slices with so many rows.
inline std::vector<Sums> sums_of_slices(const at::Tensor& tensor, const std::vector<int64_t>& rows) {
  const size_t all = static_cast<size_t>(tensor.size(0)), row = all == 0 ? 0 : tensor.nbytes() / all;
  return checksums(static_cast<const char*>(tensor.const_data_ptr()), rows, row, number_size(tensor));
}

// How many rows of a tensor belong to each of so many ranks; empty: the call is wrong.
inline std::vector<int64_t> rows_of(const at::Tensor& tensor, std::vector<int64_t> split, size_t size) {
  if (tensor.dim() == 0) return {};
  const auto ranks = static_cast<int64_t>(size);
  if (split.empty() && tensor.size(0) % ranks == 0) split.assign(size, tensor.size(0) / ranks);
  const bool right = split.size() == size && std::all_of(split.begin(), split.end(), [](int64_t rows) { return rows >= 0; });
  return right && std::accumulate(split.begin(), split.end(), int64_t{0}) == tensor.size(0) ? split : std::vector<int64_t>();
}

// The tensors of an argument that is a tensor, or a list of tensors.
inline std::vector<IValue> tensors_in(const IValue& argument) {
  if (!argument.isList()) return {argument};
  return std::vector<IValue>(argument.toListRef().begin(), argument.toListRef().end());
}

// The tensor of an argument that is a tensor, or a list of one; else null.
inline const at::Tensor* only_tensor(const IValue& argument) {
  if (argument.isTensor()) return &argument.toTensor();
  if (!argument.isList() || argument.toListRef().size() != 1) return nullptr;
  const IValue& first = argument.toListRef()[0];
  return first.isTensor() ? &first.toTensor() : nullptr;
}

// Whether these tensors can be summed and none shares memory with another: then each has one rank's data.
inline bool are_apart(const std::vector<IValue>& tensors) {
  std::vector<std::pair<const char*, size_t>> places;
  for (const IValue& each : tensors) {
    if (!each.isTensor() || !can_be_summed(each.toTensor())) return false;
    places.emplace_back(static_cast<const char*>(each.toTensor().const_data_ptr()), each.toTensor().nbytes());
  }
  std::sort(places.begin(), places.end());
  for (size_t at = 1; at < places.size(); ++at) {
    if (places[at - 1].first + places[at - 1].second > places[at].first) return false;
  }
  return true;
}

// Whether each of these outputs of an all_gather has the data of one rank.
inline bool is_gathered(const IValue& outputs, size_t size) {
  if (outputs.isTensor()) return can_be_summed(outputs.toTensor()) && outputs.toTensor().numel() % static_cast<int64_t>(size) == 0;
  if (!outputs.isList() || outputs.toListRef().size() != 1 || !outputs.toListRef()[0].isList()) return false;
  const std::vector<IValue> tensors = tensors_in(outputs.toListRef()[0]);
  return tensors.size() == size && are_apart(tensors);
}

inline bool is_gloo(c10d::ProcessGroup& process_group) {
  try {
    return process_group.getBackend(c10::DeviceType::CPU)->getBackendName() == "gloo";
  } catch (const std::exception&) {
    return false;
  }
}

// Print once, on rank 0, that operations on devices are not checked.
inline void refuse_devices(Session& session, const char* op) {
  if (!session.checks.refuses_devices()) return;
  const char* const rank = getenv("RANK");
  if (rank != nullptr && strcmp(rank, "0") != 0) return;
  Session::say("collectives on GPUs are not checked for corrupt data", op, "equal bits on all ranks are shown for Gloo only");
}

// The check of one operation.
struct Check {
  Record head;
  // What this rank gives to others: to all the same, or to each rank its own.
  std::vector<Sums> inputs;
  // Number of outputs that are compared.
  size_t outputs = 1;
  // How many rows of the only output are from each rank; empty: an output is not split.
  std::vector<int64_t> rows;
};

// Sums what an all_to_all gives to each rank. Returns false if it cannot be compared.
inline bool begin_all_to_all(const IValue* args, size_t size, Check* check) {
  std::vector<IValue> tensors = tensors_in(args[0]);
  const std::vector<IValue> given = tensors_in(args[1]);
  tensors.insert(tensors.end(), given.begin(), given.end());
  if (!are_apart(tensors)) return false;
  if (args[0].isTensor()) {
    check->rows = rows_of(args[0].toTensor(), args[3].toIntVector(), size);
    const std::vector<int64_t> rows = rows_of(args[1].toTensor(), args[4].toIntVector(), size);
    if (rows.empty() || check->rows.empty()) return false;
    check->inputs = sums_of_slices(args[1].toTensor(), rows);
    return true;
  }
  check->outputs = size;
  for (const IValue& each : given) check->inputs.push_back(sums_of(each.toTensor()));
  return tensors.size() == 2 * size && given.size() == size;
}

// Most ranks of a group whose all_gathers and all_to_alls are checked: each output is a record.
constexpr size_t kMostOutputs = 64;

// The check of an operation that is about to be launched on the CPU; none if it is not one of those that are checked.
inline std::optional<Check> check_of(Session& session, const Group& group, const Record& record, const IValue* args,
                                     c10d::ProcessGroup& process_group) {
  if (!session.checks.due(record.seq) || !group.aligned || group.size < 2) return std::nullopt;
  const uint64_t began = now_ns();
  Check check;
  check.head = record;
  const auto size = static_cast<size_t>(group.size);
  const bool gathers = record.op == format::kAllGather, exchanges = record.op == format::kAllToAll;
  if (gathers || exchanges) {
    if (size > kMostOutputs) return std::nullopt;
  } else if (record.op != format::kAllReduce && record.op != format::kBroadcast) {
    return std::nullopt;
  }
  if (!is_gloo(process_group)) return std::nullopt;
  if (exchanges) {
    if (!begin_all_to_all(args, size, &check)) return std::nullopt;
  } else {
    if (gathers && !is_gathered(args[0], size)) return std::nullopt;
    if (gathers) check.outputs = size;
    const at::Tensor* const given = only_tensor(args[gathers ? 1 : 0]);
    if (given == nullptr || !can_be_summed(*given)) return std::nullopt;
    const bool sends = gathers || (record.op == format::kBroadcast && group.global_rank(process_group.getRank()) == record.peer);
    if (sends) check.inputs.push_back(sums_of(*given));
  }
  session.checks.spent(now_ns() - began);
  return check;
}

// Write the check of an operation that has ended, with these outputs.
inline void write_check(Session& session, const Check& check, const IValue& outputs) {
  if (session.off.load(std::memory_order_relaxed) || !outputs.isList()) return;
  const uint64_t began = now_ns();
  const std::vector<IValue> tensors = tensors_in(outputs);
  if (tensors.size() != check.outputs || !are_apart(tensors)) return;
  std::vector<Sums> sums;
  if (check.rows.empty()) {
    for (const IValue& each : tensors) sums.push_back(sums_of(each.toTensor()));
  } else if (rows_of(tensors[0].toTensor(), check.rows, check.rows.size()).empty()) {
    return;  // the user has given it another size
  } else {
    sums = sums_of_slices(tensors[0].toTensor(), check.rows);
  }
  Record record;
  record.op = format::kChecksum;
  record.group = check.head.group;
  record.tag = -static_cast<int32_t>(check.head.op);
  record.seq = check.head.seq;
  record.waited_us = static_cast<uint32_t>(sums.size() + check.inputs.size());
  record.start_ns = began;
  const auto write = [&](int place, const Sums& of) {
    record.peer = place;
    record.size_bytes = of.plain;
    record.launch_ns = of.weighted;
    session.ring()->write(record);
  };
  for (size_t at = 0; at < check.inputs.size(); ++at) write(-1 - static_cast<int>(at), check.inputs[at]);
  for (size_t at = 0; at < sums.size(); ++at) write(static_cast<int>(at), sums[at]);
  session.checks.spent(now_ns() - began);
}

// A Work whose end is visible only once the outputs have been read: until then no user can change them.
class CheckedWork : public ForwardingWork {
 public:
  CheckedWork(c10::intrusive_ptr<c10d::Work> work, c10::intrusive_ptr<c10::ivalue::Future> checked)
      : ForwardingWork(std::move(work)), checked_(std::move(checked)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const bool result = work_->wait(timeout);
    checked_->wait();
    return result;
  }

  bool isCompleted() override { return work_->isCompleted() && checked_->completed(); }
  void synchronize() override {
    work_->synchronize();
    checked_->wait();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return checked_; }

 private:
  const c10::intrusive_ptr<c10::ivalue::Future> checked_;
};

// Replace the Work of an operation on the stack by one that is checked. Without effect if it has no future.
inline void check_end(IValue& result, Check check, const std::shared_ptr<Flight>& flight) {
  auto work = result.toCustomClass<c10d::Work>();
  if (!work) return;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  try {
    future = work->getFuture();
  } catch (const std::exception&) {
    return;
  }
  if (!future) return;
  auto checked = future->then(
      [check = std::move(check), flight](c10::ivalue::Future& ended) {
        IValue outputs = ended.value();  // raises if the operation failed, which then is the failure of this future as well
        try {
          flight->in_session([&](Session& session) { write_check(session, check, outputs); });
        } catch (const std::exception&) {  // no memory: without a check
        }
        return outputs;
      },
      future->elementType());
  result = IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<CheckedWork>(std::move(work), std::move(checked))));
}

}  // namespace commwatch
