// Whether the device has reached an operation of NCCL's, as its Work knows: PyTorch records an event before the operation if its timing is enabled.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <string_view>
#include <typeinfo>

#include "runtime.h"

namespace commwatch {

class WorkStart {
 public:
  // Whether a Work knows it. Those of other backends, and of backends that forward to NCCL's, do not.
  static bool known_to(const c10d::Work& work) {
    static const std::string_view nccl = "N4c10d16ProcessGroupNCCL8WorkNCCLE";
    return started() != nullptr && typeid(work).name() == nccl;
  }

  // Whether the device has reached the operation; false while its timing is not enabled. Only if the Work knows it. Queries one event.
  static bool seen(const c10d::Work& work) { return started()(&work); }

 private:
  // A member function of that type; libraries of torch without CUDA do not declare it.
  using Started = bool (*)(const c10d::Work*);

  static Started started() {
    static const auto found =
        reinterpret_cast<Started>(function_of("libtorch_cuda.so", "_ZNK4c10d16ProcessGroupNCCL8WorkNCCL27startedGPUExecutionInternalEv"));
    return found;
  }
};

}  // namespace commwatch
