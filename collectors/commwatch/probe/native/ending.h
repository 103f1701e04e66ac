// Finds the end of an operation on the CPU: by its future, by a wait, or by polling its Work.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/version.h>

#include <memory>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "flight.h"

namespace commwatch {

using c10::IValue;

template <class Work>
c10::intrusive_ptr<c10::ivalue::Future> future_result_of(Work& work) {
  if constexpr (requires { work.getFutureResult(); }) {
    return work.getFutureResult();
  } else {
    return nullptr;
  }
}

template <class Work>
std::chrono::milliseconds timeout_of(const Work& work) {
  if constexpr (requires { work.getTimeout(); }) {
    return work.getTimeout();
  } else {
    return std::chrono::milliseconds::zero();
  }
}

// Wraps a Work, and forwards every call.
class ForwardingWork : public c10d::Work {
 public:
  explicit ForwardingWork(c10::intrusive_ptr<c10d::Work> work) : Work(-1, work->retrieveOpType()), work_(std::move(work)) {}

  bool wait(std::chrono::milliseconds timeout) override { return work_->wait(timeout); }
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  void synchronize() override { work_->synchronize(); }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
  void blockCurrentStream() override { work_->blockCurrentStream(); }
#endif
  void abort() override { work_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }
  // These are overrides only if this torch has the functions; 2.5 does not.
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() { return future_result_of(*work_); }
  std::chrono::milliseconds getTimeout() const { return timeout_of(*work_); }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }

 protected:
  const c10::intrusive_ptr<c10d::Work> work_;
};

// A Work that has no future and cannot report completion (Gloo's send, recv, reduce_scatter). Records the waits, because only a
// wait shows the end.
class WatchedWork : public ForwardingWork {
 public:
  WatchedWork(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<Flight> flight)
      : ForwardingWork(std::move(work)), flight_(std::move(flight)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    flight_->wait_begins();
    const Flight::Waiting waiting(*flight_);
    try {
      const bool result = work_->wait(timeout);
      flight_->finish(now_ns(), format::kByWait);
      return result;
    } catch (...) {
      flight_->finish(now_ns(), format::kByWait, format::kFailed);
      throw;
    }
  }

  bool isCompleted() override {
    const bool completed = work_->isCompleted();
    if (completed && !flight_->done()) {
      flight_->finish(now_ns(), format::kByPoll, work_->exception() ? format::kFailed : 0);
    }
    return completed;
  }

 private:
  const std::shared_ptr<Flight> flight_;
};

// A Work whose end its future shows. Sees how long threads are blocked, as long as they wait here.
class AwaitedWork : public ForwardingWork {
 public:
  AwaitedWork(c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<Flight> flight)
      : ForwardingWork(std::move(work)), flight_(std::move(flight)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const Flight::Waiting waiting(*flight_);
    return work_->wait(timeout);
  }
  bool isCompleted() override {
    flight_->wait_unseen();  // its caller may ask until it has ended
    return work_->isCompleted();
  }
  void synchronize() override {
    flight_->wait_unseen();
    work_->synchronize();
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    flight_->wait_unseen();
    return work_->getFuture();
  }

 private:
  const std::shared_ptr<Flight> flight_;
};

enum class Ending : uint8_t { kUntried, kFuture, kWait, kPoll, kNone };

struct TypeKey {
  const std::type_info* type;
  bool operator==(const TypeKey& other) const { return *type == *other.type; }
};

// How each kind of Work reports its end. Determined once per kind: a Work without a future throws, which is expensive.
inline Few<TypeKey, std::atomic<Ending>>& endings() {
  static auto* known = new Few<TypeKey, std::atomic<Ending>>;
  return *known;
}

inline Ending without_future(const std::string& type) {
  const auto is = [&type](const char* part) { return type.find(part) != std::string::npos; };
  if (is("ProcessGroupGloo") || is("LambdaWork")) return Ending::kWait;
  // Written in Python: polling it from another thread would take the GIL, and a wrapper would hide its class.
  return is("PyWork") || is("PythonCallbackWork") ? Ending::kNone : Ending::kPoll;
}

inline void follow_future(c10::ivalue::Future& future, std::shared_ptr<Flight> flight) {
  const auto finish = [](Flight& over, c10::ivalue::Future& ended) {
    over.finish(now_ns(), format::kByFuture, ended.hasError() ? format::kFailed : 0);
  };
  if (future.completed()) {
    finish(*flight, future);
    return;
  }
  flight->watch(now_ns());
  future.addCallback([flight = std::move(flight), finish](c10::ivalue::Future& ended) { finish(*flight, ended); },
                     /*uses_future=*/false);
}

inline void follow_by_looking(Session& session, c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<Flight> flight) {
  if (flight->on_cpu && !flight->p2p()) flight->watch(now_ns());
  session.poller().add([work = std::move(work), flight = std::move(flight)] {
    try {
      if (!work->isCompleted()) return false;
      // Not isSuccess(): NCCL's Work no longer supports it, and throws.
      flight->finish(now_ns(), format::kByPoll, work->exception() ? format::kFailed : 0);
    } catch (...) {  // the operation failed; its owner gets the error from its own wait
      flight->finish(now_ns(), format::kByPoll, format::kFailed);
    }
    return true;
  });
}

// Returns whether its future shows the end.
inline bool follow_on_cpu(Session& session, IValue& result, c10::intrusive_ptr<c10d::Work> work, std::shared_ptr<Flight> flight) {
  const c10d::Work& held = *work;
  std::atomic<Ending>& ending = endings()[TypeKey{&typeid(held)}];
  if (ending.load() <= Ending::kFuture) {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    try {
      future = work->getFuture();
    } catch (const std::exception&) {
    }
    ending.store(future ? Ending::kFuture : without_future(typeid(held).name()));
    if (future) {
      follow_future(*future, std::move(flight));
      return true;
    }
  }
  flight->wait_unseen();
  switch (ending.load()) {
    case Ending::kWait:
      if (!flight->p2p()) flight->watch(now_ns());
      result = IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<WatchedWork>(std::move(work), std::move(flight))));
      break;
    case Ending::kPoll:
      follow_by_looking(session, std::move(work), std::move(flight));
      break;
    default:
      flight->finish(now_ns(), format::kByNone, format::kUntimed);
  }
  return false;
}

// See who waits for an operation whose Work is on the stack.
inline void see_waits(IValue& result, std::shared_ptr<Flight> flight) {
  auto work = result.toCustomClass<c10d::Work>();
  result = IValue(c10::intrusive_ptr<c10d::Work>(c10::make_intrusive<AwaitedWork>(std::move(work), std::move(flight))));
}

}  // namespace commwatch
