// Functions of the CUDA runtime as PyTorch's libraries call them while we watch: they record events and let streams wait.
//
// Only with timing by events, and only for operations on one GPU of this process.
#pragma once

#include <dlfcn.h>

#include "device.h"
#include "entered.h"
#include "flight.h"
#include "imports.h"
#include "stream_waits.h"

namespace commwatch {

// Whether the calling thread is in an operation of communication.
class InOperation {
 public:
  InOperation() { ++of_thread().depth; }
  InOperation(const InOperation&) = delete;
  InOperation& operator=(const InOperation&) = delete;
  ~InOperation() { --of_thread().depth; }

  // The calling thread has so many batches open, whose operations run when they end.
  static void batches(size_t open) { of_thread().batches = open; }
  static bool now() { return of_thread().depth > 0 || of_thread().batches > 0; }

 private:
  struct Open {
    int depth = 0;
    size_t batches = 0;
  };
  static Open& of_thread() {
    static thread_local Open open;
    return open;
  }
};

class CudaWaits {
 public:
  // Measure the waits of this session from its first operation on this GPU on. With a second GPU it measures nothing: the streams of
  // different GPUs can have the same handle.
  static void watch(Session& session, const c10::Device& device) {
    if (session.waits.begun()) {
      if (device.index() != watched().load()) session.waits.stop();
      return;
    }
    if (!device.is_cuda() || device_timing().load() != DeviceTiming::kEvents || !replaced()) return session.waits.stop();
    watched().store(device.index());
    session.waits.begin(real(), *new Handles);  // never destroyed, like what CUDA gave it
  }

  // The stream that is current in this thread is the one that computes. Does not throw.
  static void compute_here(Session& session) {
    if (session.off.load() || device_timing().load() != DeviceTiming::kEvents || !session.waits.measures()) return;
    void* handle = nullptr;
    if (stream_here(gpu(), &handle)) {
      session.waits.compute_on(handle);
    } else {
      session.waits.missed();
    }
  }

  // Whether this thread's stream on the GPU is the one that computes.
  static bool computes_here(const Session& session, const c10::Device& device) {
    void* handle = nullptr;
    return session.waits.measures() && stream_here(device, &handle) && session.waits.is_compute(handle);
  }

  // Only while no other thread communicates.
  static void restore() {
    const std::lock_guard<std::mutex> lock(replacing());
    imports().restore();
  }

 private:
  // What the poller has of a wait.
  struct LookAtWait {
    Session& session;
    std::unique_ptr<StreamWaits::Wait> wait;

    bool operator()() const {
      try {
        use_in_this_thread(gpu());
        return session.waits.look(*wait);
      } catch (const std::exception& error) {
        device_fails(error.what());
        session.waits.stop();
        return true;
      }
    }
  };

  // The runtime's handle of this thread's stream on a GPU; false if torch does not tell.
  static bool stream_here(const c10::Device& device, void** handle) noexcept {
    try {
      const c10::impl::VirtualGuardImpl guard(device.type());
      return Runtime::handle_of(guard.getStream(device), handle, 0);
    } catch (...) {
      return false;
    }
  }

  // Whether the watched GPU is this thread's current one. The default streams of all GPUs have one handle.
  static bool is_here() noexcept {
    try {
      return c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getDevice() == gpu();
    } catch (...) {
      return false;
    }
  }

  static CudaEvents& real() {
    static CudaEvents* const found = new CudaEvents(find());  // never destroyed: a call may come at the very end
    return *found;
  }

  static CudaEvents find() {
    CudaEvents cuda{};
    const auto look = [](const char* name, auto* function) {
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(function_of("libtorch_cuda.so", name));
    };
    look("cudaEventCreateWithFlags", &cuda.create);
    look("cudaEventDestroy", &cuda.destroy);
    look("cudaEventRecord", &cuda.record);
    look("cudaEventRecordWithFlags", &cuda.record_with);
    look("cudaEventQuery", &cuda.query);
    look("cudaEventElapsedTime", &cuda.elapsed);
    look("cudaStreamWaitEvent", &cuda.wait);
    look("cudaStreamIsCapturing", &cuda.capturing);
    look("cudaGetLastError", &cuda.last_error);
    return cuda;
  }

  // Once per process, and again after `restore`.
  static bool replaced() {
    const std::lock_guard<std::mutex> lock(replacing());
    if (imports().count() > 0) return true;
    const CudaEvents& cuda = real();
    const bool all = cuda.create && cuda.destroy && cuda.record && cuda.query && cuda.elapsed && cuda.wait && cuda.capturing && cuda.last_error;
    return all && imports().replace({{"cudaEventRecord", reinterpret_cast<void*>(cuda.record), reinterpret_cast<void*>(&record)},
                                     {"cudaEventRecordWithFlags", reinterpret_cast<void*>(cuda.record_with), reinterpret_cast<void*>(&record_with)},
                                     {"cudaStreamWaitEvent", reinterpret_cast<void*>(cuda.wait), reinterpret_cast<void*>(&wait)}},
                                    {"libtorch_cuda", "libtorch_python", "libc10_cuda"});
  }

  // Call `call`, which records an event, and return its result.
  template <class Call>
  static int recorded(const void* event, const void* stream, Call call) {
    const Entered entered;
    Session* const session = entered.get();
    if (session == nullptr) return call();
    session->waits.fetch(event);
    const int result = call();
    session->waits.recorded(event, stream, InOperation::now());
    return result;
  }

  static int record(void* event, void* stream) {
    return recorded(event, stream, [&] { return real().record(event, stream); });
  }

  static int record_with(void* event, void* stream, unsigned flags) {
    return recorded(event, stream, [&] { return real().record_with(event, stream, flags); });
  }

  static int wait(void* stream, void* event, unsigned flags) {
    const Entered entered;
    Session* const session = entered.get();
    if (session != nullptr) {
      session->waits.fetch(event);
      StreamWaits::Wait::fetch();
      Poller::fetch<LookAtWait>();
    }
    if (session == nullptr || !session->waits.counts(stream, event)) return real().wait(stream, event, flags);
    if (session->off.load() || !session->records_all() || device_timing().load() != DeviceTiming::kEvents || !is_here()) {
      session->waits.missed();
      return real().wait(stream, event, flags);
    }
    std::unique_ptr<StreamWaits::Wait> measured;
    const uint32_t cost_of = Cost::due();
    {
      const Cost cost(*session, cost_of);
      try {
        measured = session->waits.begins(stream);
      } catch (const std::exception&) {  // no memory
        session->waits.missed();
      }
    }
    const int result = real().wait(stream, event, flags);
    const Cost cost(*session, cost_of);
    if (!measured || !session->waits.ends(*measured, stream)) return result;
    try {
      session->poller().add(LookAtWait{*session, std::move(measured)}, line_of(&session->waits, 0), true);
    } catch (const std::exception&) {
      session->waits.missed();
    }
    return result;
  }

  static std::mutex& replacing() {
    static auto* const mutex = new std::mutex;
    return *mutex;
  }

  static Imports& imports() {
    static Imports* const all = new Imports;
    return *all;
  }

  // Its index.
  static std::atomic<c10::DeviceIndex>& watched() {
    static std::atomic<c10::DeviceIndex> index{0};
    return index;
  }
  static c10::Device gpu() { return {c10::DeviceType::CUDA, watched().load()}; }
};

}  // namespace commwatch
