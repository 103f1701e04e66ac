// A simulated GPU with NCCL, in real time: work on a stream lasts as long as the test sets, on its own clock.
//
// It is torch's device PrivateUse1, with the guard, streams and events that torch requires; the functions of the CUDA runtime in
// a process with CUDA; and a backend whose works behave like ProcessGroupNCCL's since torch 2.8: none for a blocking operation,
// which runs on the current stream; within a batch, works that report completion at once; durations on demand, once enabled.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <time.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>

namespace {

using c10::DeviceType;
constexpr int kMain = 0, kNccl = 7, kStreams = 8;

std::mutex mutex;
int64_t busy_until[kStreams];
std::atomic<int64_t> op_takes{0}, clock_rate{1};
std::atomic<int> events[2], works{0}, disturbed{0}, at_home{0}, timed_groups{0};
std::atomic<bool> capturing{false}, broken{false}, slow{false};
thread_local int capture_mode = 0, device = -1;
thread_local c10::StreamId current = kMain;

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

// Put work of this duration on a stream, not before `ready`; returns its begin.
int64_t enqueue(c10::StreamId stream, int64_t takes, int64_t ready = 0) {
  const std::lock_guard<std::mutex> lock(mutex);
  const int64_t begin = std::max({now(), busy_until[stream], ready});
  busy_until[stream] = begin + takes;
  return begin;
}

// Every query of the device calls this: a query from a thread in the default mode breaks a capture in global mode, and a thread
// without a current device initializes the first one.
void ask() {
  if (capturing && capture_mode != 2) ++disturbed;
  if (device < 0) ++at_home;
  TORCH_CHECK(!broken, "the fake GPU fell off the bus\nand this is told in two lines");
}

struct FakeEvent {
  explicit FakeEvent(bool t) : timed(t) { ++events[t]; }
  const bool timed;
  int64_t at = 0;
  bool captured = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(DeviceType::PrivateUse1, 0), id); }
  DeviceType type() const override { return DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device to) const override {
    const c10::Device before = getDevice();
    device = to.index();
    return before;
  }
  c10::Device getDevice() const override { return {DeviceType::PrivateUse1, 0}; }
  void setDevice(c10::Device to) const override { device = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { device = to.index(); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream exchangeStream(c10::Stream to) const override { return stream(std::exchange(current, to.id())); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id() + 1); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    TORCH_CHECK(!broken, "the fake GPU fell off the bus\nand this is told in two lines");
    if (*event == nullptr) *event = new FakeEvent(flag == c10::EventFlag::BACKEND_DEFAULT);
    auto* recorded = static_cast<FakeEvent*>(*event);
    recorded->at = enqueue(stream.id(), 0);
    recorded->captured = capturing;
  }
  bool queryEvent(void* event) const override {
    ask();
    if (static_cast<FakeEvent*>(event)->captured) ++disturbed;
    return now() >= static_cast<FakeEvent*>(event)->at;
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    ask();
    TORCH_CHECK(static_cast<FakeEvent*>(from)->timed && static_cast<FakeEvent*>(to)->timed, "events without a clock");
    return static_cast<double>((static_cast<FakeEvent*>(to)->at - static_cast<FakeEvent*>(from)->at) * clock_rate) / 1e6;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<FakeEvent*>(event); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class NcclWork : public c10d::Work {
 public:
  // begin < 0: within a batch, where its events are never recorded.
  NcclWork(std::vector<at::Tensor> held, int64_t begin, int64_t end, bool timed)
      : held_(std::move(held)), begin_(begin), end_(end), timed_(timed) {
    ++works;
  }
  ~NcclWork() override { --works; }
  bool isCompleted() override {
    ask();
    while (slow && now() < end_) usleep(1000);  // as NCCL's does while another thread holds the communicator's lock
    return now() >= end_;
  }
  bool wait(std::chrono::milliseconds) override {
    enqueue(current, 0, end_);
    return true;
  }
  float getDuration() const override {
    ask();
    TORCH_CHECK(timed_ && begin_ >= 0, "getDuration only works if timing was enabled");
    return static_cast<float>((end_ - begin_) * clock_rate) / 1e6f;
  }

 private:
  const std::vector<at::Tensor> held_;
  const int64_t begin_, end_;
  const bool timed_;
};

class Nccl : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "fake nccl"; }
  bool supportsCoalescing() const override { return true; }
  void enableCollectivesTiming() override {
    timed_ = true;
    ++timed_groups;
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return run(tensors, options.asyncOp);
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int, int) override { return run(tensors, true); }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int, int) override { return run(tensors, true); }

  void startCoalescing() override { batched_ = 0; }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    const int64_t takes = std::exchange(batched_, -1);
    return launch({}, async_, takes);
  }

 private:
  c10::intrusive_ptr<c10d::Work> run(std::vector<at::Tensor>& tensors, bool async) {
    if (batched_ < 0) return launch(tensors, async, op_takes);
    batched_ += op_takes;
    async_ = async;
    return async ? c10::make_intrusive<NcclWork>(tensors, -1, 0, timed_) : nullptr;
  }

  c10::intrusive_ptr<c10d::Work> launch(std::vector<at::Tensor> held, bool async, int64_t takes) {
    if (!async) {
      enqueue(current, takes);
      return nullptr;
    }
    const int64_t begin = enqueue(kNccl, takes, enqueue(current, 0));
    return c10::make_intrusive<NcclWork>(std::move(held), begin, begin + takes, timed_);
  }

  bool timed_ = false, async_ = false;
  int64_t batched_ = -1;
};

at::Tensor tensor(int64_t elements) {
  const c10::Device on(DeviceType::PrivateUse1, 0);
  auto* memory = new char[4 * elements];
  at::DataPtr data(memory, memory, [](void* m) { delete[] static_cast<char*>(m); }, on);
  c10::Storage storage(c10::Storage::use_byte_size_t(), 4 * elements, std::move(data), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                       caffe2::TypeMeta::Make<float>());
  made.unsafeGetTensorImpl()->set_sizes_contiguous({elements});
  return made;
}

TORCH_LIBRARY(fake_gpu, m) { m.def("tensor(int elements) -> Tensor", &tensor); }

}  // namespace

// -- functions of a process with CUDA

extern "C" int cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(*mode, capture_mode);
  return 0;
}
extern "C" int cudaStreamIsCapturing(void*, int* status) {
  *status = capturing ? 1 : 0;
  return 0;
}
extern "C" int cudaGetLastError() { return 0; }

// -- functions that the test calls

extern "C" void gpu_use(const char* group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  const auto backend = c10::make_intrusive<Nccl>(group->getRank(), group->getSize());
  backend->setGroupUid(group_name);
  group->setBackend(DeviceType::PrivateUse1, c10d::ProcessGroup::CUSTOM, backend);
  device = 0;
}
extern "C" void gpu_compute(int64_t ns) { enqueue(current, ns); }
extern "C" void gpu_op_takes(int64_t ns) { op_takes = ns; }
extern "C" void gpu_capture(int on) { capturing = on != 0; }
extern "C" int gpu_capturing() { return capturing ? 1 : 0; }
extern "C" void gpu_set_device() { device = 0; }
extern "C" void gpu_break() { broken = true; }
extern "C" void gpu_slow() { slow = true; }
extern "C" void gpu_clock_rate(int64_t times) { clock_rate = times; }
extern "C" int64_t gpu_nccl_over() {
  const std::lock_guard<std::mutex> lock(mutex);
  return busy_until[kNccl];
}
extern "C" int gpu_events(int timed) { return events[timed]; }
extern "C" int gpu_works() { return works; }
extern "C" int gpu_timed_groups() { return timed_groups; }
extern "C" int gpu_disturbed() { return disturbed; }
extern "C" int gpu_at_home() { return at_home; }
