// Keeps the poller from asking NCCL for a communicator's errors.
//
// c10d::Work::isCompleted does so for NCCL. PyTorch checks first that the communicator is not destroyed, but not under the same lock: if the
// training thread destroys it in between, NCCL reads freed memory, and the job ends with a segmentation fault. While the group exists, PyTorch's
// watchdog checks for errors, and it ends before the communicator is destroyed. So the poller need not check: in its thread, the function that
// PyTorch imports returns no error.
#pragma once

#include "imports.h"
#include "runtime.h"

namespace commwatch {

class NcclErrors {
 public:
  // From now on, this thread does not ask NCCL. Returns false if PyTorch's calls cannot be replaced, as with an NCCL that is a part of PyTorch.
  static bool not_asked_here() {
    static const bool replaced = replace();
    asks_not() = replaced;
    return replaced;
  }

 private:
  using Get = int (*)(void* comm, int* error);

  static bool replace() {
    constexpr const char* kName = "ncclCommGetAsyncError";
    original() = reinterpret_cast<Get>(function_of("libtorch_cuda.so", kName));
    if (original() == nullptr) original() = reinterpret_cast<Get>(function_of("libtorch_hip.so", kName));
    static auto* const imports = new Imports;  // never restored: other threads only pass through
    return original() != nullptr &&
           imports->replace({{kName, reinterpret_cast<void*>(original()), reinterpret_cast<void*>(&get)}}, {"libtorch_cuda", "libtorch_hip"});
  }

  static int get(void* comm, int* error) {
    if (!asks_not()) return original()(comm, error);
    *error = 0;
    return 0;
  }

  static Get& original() {
    static Get function = nullptr;
    return function;
  }
  static bool& asks_not() {
    static thread_local bool of_thread = false;
    return of_thread;
  }
};

}  // namespace commwatch
