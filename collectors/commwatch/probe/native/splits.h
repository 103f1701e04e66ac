// The split sizes of an all_to_all, from its arguments.
#pragma once

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <cstdint>

#include "format.h"
#include "ring.h"

namespace commwatch {

// What one rank sends, or expects.
class Side {
 public:
  // tensors: one for each rank.
  explicit Side(const c10::IValue& tensors) : parts_(tensors.toListRef()) {}

  // rows: one tensor; splits: how many rows of it belong to each rank, empty if to each the same.
  Side(const c10::IValue& rows, const c10::IValue& splits) : rows_(&rows.toTensor()), parts_(splits.toListRef()) {}

  // Whether its sizes are known. Those of an invalid call are not, nor those of sparse tensors.
  bool has(size_t members) const {
    if (rows_ != nullptr) return is_sized(*rows_) && (parts_.empty() || parts_.size() == members);
    return parts_.size() == members && std::all_of(parts_.begin(), parts_.end(), [](const c10::IValue& part) { return is_sized(part.toTensor()); });
  }

  void write(uint64_t* sizes, size_t members) const {
    const uint64_t bytes = rows_ != nullptr ? rows_->nbytes() : 0;
    const int64_t rows = rows_ != nullptr && rows_->dim() != 0 ? rows_->size(0) : 1;
    const uint64_t row = rows != 0 ? bytes / rows : 0;
    for (size_t i = 0; i < members; ++i) {
      sizes[i] = rows_ == nullptr ? parts_[i].toTensor().nbytes() : parts_.empty() ? bytes / members : row * parts_[i].toInt();
    }
  }

 private:
  static bool is_sized(const at::Tensor& tensor) { return tensor.defined() && tensor.layout() == c10::kStrided; }

  const at::Tensor* const rows_ = nullptr;
  const c10::ArrayRef<c10::IValue> parts_;
};

// Notes what this rank sends to each rank of its group, and expects from each; not of large groups.
inline void note_splits(Ring& ring, const Record& record, const c10::IValue* args, int group_at, int group_size) {
  if (group_size > format::kMostMembers || (record.flags & format::kUnaligned) != 0) return;
  const auto members = static_cast<size_t>(group_size);
  const bool is_list = args[0].isList();
  const Side expects = is_list ? Side(args[0]) : Side(args[0], args[group_at + 1]);
  const Side sends = is_list ? Side(args[1]) : Side(args[1], args[group_at + 2]);
  if (!expects.has(members) || !sends.has(members)) return;
  ring.note_splits(record, static_cast<uint16_t>(members), [&](uint64_t* sizes) {
    sends.write(sizes, members);
    expects.write(sizes + members, members);
  });
}

}  // namespace commwatch
