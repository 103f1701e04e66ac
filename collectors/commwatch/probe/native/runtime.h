// Functions of the CUDA (HIP) runtime that we call directly: those without an equivalent in c10, and those that are cheaper so. Does not
// depend on torch.
#pragma once

#include <dlfcn.h>

#include <optional>

namespace commwatch {

// A function of this process, or of a library of torch that is loaded; null if there is none.
inline void* function_of(const char* library, const char* name) {
  if (void* const found = dlsym(RTLD_DEFAULT, name)) return found;
  void* const loaded = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
  return loaded != nullptr ? dlsym(loaded, name) : nullptr;
}

// Null if this process has no such runtime.
struct Runtime {
  int (*exchange_capture_mode)(int*);
  int (*is_capturing)(void*, int*);
  int (*record)(void*, void*);                // may be null, as the next: c10 has them, too
  int (*elapsed)(float*, void*, void*);
  int (*last_error)();

  static const Runtime& get() {
    static const Runtime found = find();
    return found;
  }

  // Whether a stream is being captured into a graph; absent if unknown. handle: becomes the stream's.
  template <class Stream>
  std::optional<bool> capturing(const Stream& stream, void** handle) const {
    int status = 0;
    if (is_capturing == nullptr || !handle_of(stream, handle, 0)) return std::nullopt;
    if (is_capturing(*handle, &status) == 0) return status != 0;
    last_error();  // clear our error, so that torch's next check does not report it
    return std::nullopt;
  }

  // Let this thread's calls not break captures in other threads.
  bool step_aside() const {
    int mode = 2;  // cudaStreamCaptureModeRelaxed
    return exchange_capture_mode != nullptr && exchange_capture_mode(&mode) == 0;
  }

  // The runtime's handle of a stream. Before torch had native_handle(), only CUDAStream::stream() returns it, which is in a library
  // that a CPU build does not have; a CUDAStream is one c10::Stream.
  template <class Stream>
  static auto handle_of(const Stream& stream, void** handle, int) -> decltype(stream.native_handle(), bool()) {
    *handle = stream.native_handle();
    return true;
  }
  template <class Stream>
  static bool handle_of(const Stream& stream, void** handle, long) {
    static void* const library = dlopen("libc10_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    static const auto of_cuda =
        reinterpret_cast<void* (*)(const Stream*)>(library != nullptr ? dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv") : nullptr);
    if (of_cuda == nullptr) return false;
    *handle = of_cuda(&stream);
    return true;
  }

 private:
  static Runtime find() {
    for (const bool cuda : {true, false}) {
      const auto look = [cuda](const char* name) { return function_of(cuda ? "libtorch_cuda.so" : "libtorch_hip.so", name); };
      const Runtime runtime{
          reinterpret_cast<int (*)(int*)>(look(cuda ? "cudaThreadExchangeStreamCaptureMode" : "hipThreadExchangeStreamCaptureMode")),
          reinterpret_cast<int (*)(void*, int*)>(look(cuda ? "cudaStreamIsCapturing" : "hipStreamIsCapturing")),
          reinterpret_cast<int (*)(void*, void*)>(look(cuda ? "cudaEventRecord" : "hipEventRecord")),
          reinterpret_cast<int (*)(float*, void*, void*)>(look(cuda ? "cudaEventElapsedTime" : "hipEventElapsedTime")),
          reinterpret_cast<int (*)()>(look(cuda ? "cudaGetLastError" : "hipGetLastError"))};
      if (runtime.exchange_capture_mode && runtime.is_capturing && runtime.last_error) return runtime;
    }
    return Runtime{};
  }
};

}  // namespace commwatch
