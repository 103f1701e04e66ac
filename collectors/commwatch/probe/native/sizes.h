// Sizes of operations, as nccl-tests counts them, from their arguments.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>

#include "format.h"

namespace commwatch {

using c10::IValue;

struct Size {
  const at::Tensor* first = nullptr;
  uint64_t bytes = 0;
  bool known = true;
};

inline void count(const IValue& value, Size* size) {
  if (value.isList()) {
    for (const IValue& part : value.toListRef()) count(part, size);
  } else if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (size->first == nullptr) size->first = &tensor;
    if (!tensor.defined() || tensor.layout() != c10::kStrided) {
      size->known = false;  // sparse: its bytes are not contiguous
    } else {
      size->bytes += tensor.nbytes();
    }
  }
}

inline Size size_of(const IValue& value, uint64_t factor = 1) {
  Size size;
  count(value, &size);
  size.bytes *= factor;
  return size;
}

inline const at::Tensor* first_tensor(const IValue& value) {
  if (value.isTensor()) return &value.toTensor();
  if (!value.isList()) return nullptr;
  for (const IValue& part : value.toListRef()) {
    if (const at::Tensor* found = first_tensor(part)) return found;
  }
  return nullptr;
}

// Whether an operation's first tensor has no data, so that nothing is communicated. A tensor of FakeTensorMode has the keys of the device that it
// stands for; asking it for its device would call Python.
inline bool has_no_data(const IValue* args, int arguments) {
  const at::Tensor* tensor = first_tensor(args[0]);
  if (tensor == nullptr && arguments > 1) tensor = first_tensor(args[1]);
  if (tensor == nullptr) return false;
  const c10::DispatchKeySet keys = tensor->key_set();
  if (keys.has_backend(c10::BackendComponent::MetaBit)) return true;
  return keys.has(c10::DispatchKey::Python) && tensor->has_storage() && tensor->storage().device_type() == c10::kMeta;
}

inline Size measured(format::Measure measure, const IValue* args, uint64_t group_size) {
  switch (measure) {
    case format::Measure::kFirst:
      return size_of(args[0]);
    case format::Measure::kSecond:
      return size_of(args[1]);
    case format::Measure::kGathered: {  // outputs, on the root only
      const Size outputs = size_of(args[0]);
      return outputs.bytes == 0 && outputs.known ? size_of(args[1], group_size) : outputs;
    }
    case format::Measure::kScattered:  // inputs, on the root only
      return args[1].toListRef().empty() ? size_of(args[0], group_size) : size_of(args[1]);
    case format::Measure::kLarger: {
      const Size output = size_of(args[0]), input = size_of(args[1]);
      return output.bytes >= input.bytes ? output : input;
    }
    case format::Measure::kNone:
      break;
  }
  Size none = size_of(args[0]);
  none.bytes = 0;
  none.known = false;
  return none;
}

}  // namespace commwatch
