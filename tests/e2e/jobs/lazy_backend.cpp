// A backend whose Work, like NCCL's, has no future and no isSuccess(), and completes when the test decides.
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <thread>

namespace {

std::atomic<int> launched{0}, alive{0}, completed{0}, failing{-1};

class LazyWork : public c10d::Work {
 public:
  explicit LazyWork(std::vector<at::Tensor> held) : held_(std::move(held)), number_(launched.fetch_add(1)) { alive.fetch_add(1); }
  ~LazyWork() override { alive.fetch_sub(1); }
  bool isCompleted() override { return number_ < completed.load(); }
  bool isSuccess() const override { TORCH_CHECK_NOT_IMPLEMENTED(false, "isSuccess() is deprecated"); }
  std::exception_ptr exception() const override {
    return number_ == failing.load() ? std::make_exception_ptr(std::runtime_error("lazy failure")) : nullptr;
  }
  bool wait(std::chrono::milliseconds) override {
    while (!isCompleted()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (exception()) std::rethrow_exception(exception());
    return true;
  }

 private:
  const std::vector<at::Tensor> held_;
  const int number_;
};

class Lazy : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "lazy"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override {
    return c10::make_intrusive<LazyWork>(tensors);
  }
};

}  // namespace

// Use the lazy backend for the group's CPU tensors from now on.
extern "C" void lazy_use(const char* group_name) {
  const auto group = c10d::resolve_process_group(group_name);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::CUSTOM, c10::make_intrusive<Lazy>(group->getRank(), group->getSize()));
}

// Complete the first works, as many as given; the one with number `fails` fails.
extern "C" void lazy_complete(int first, int fails) {
  failing.store(fails);
  completed.store(first);
}

// Number of works that are still referenced.
extern "C" int lazy_alive() { return alive.load(); }
