// Two threads of the probe: one writes the heartbeat, the other polls operations whose end is not reported.
//
// They are separate because a poll may block: in the driver, or in a backend that is being destroyed.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "spare.h"

namespace commwatch {

// Calls a function at once, and then once a second until it is stopped.
class Heartbeat {
 public:
  // begin: called once in the thread.
  Heartbeat(std::function<void()> begin, std::function<void()> beat)
      : beat_(std::move(beat)), thread_([this, begin = std::move(begin)] {
          begin();
          loop();
        }) {}

  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

  ~Heartbeat() { stop(); }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

 private:
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (auto next = std::chrono::steady_clock::now(); !stop_;) {
      lock.unlock();
      beat_();
      lock.lock();
      next += std::chrono::seconds(1);
      wake_.wait_until(lock, next, [this] { return stop_; });
    }
  }

  std::function<void()> beat_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;  // last: it uses all of the above
};

// Polls often while operations end, less and less often while none does, and sleeps while none is pending. Polls that take long are less
// frequent, because they hold locks of the driver that launches need: on an H200, polls without a pause in proportion doubled the time of small
// operations in a row. Its thread starts with the first operation.
class Poller {
 public:
  // begin: called once in the thread.
  explicit Poller(std::function<void()> begin) : begin_(std::move(begin)) {}

  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  ~Poller() { stop(); }

  // Ends the thread and destroys what was added and will be. If called in the thread itself (for example by a tensor's finalizer), it does
  // not wait: the thread ends after the call returns. It waits a second at most for a call that blocks; then this object must be kept, as
  // the thread still uses it.
  void stop() {
    std::unique_lock<std::mutex> lock(mutex_);
    stop_.store(true);
    wake_.notify_one();
    if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) {
      const bool over = ended_.wait_for(lock, kPatience, [this] { return !running_; });
      lock.unlock();
      over ? thread_.join() : thread_.detach();
    } else {
      lock.unlock();
    }
    drop_arrived();
  }

  // This thread will soon add a `Look`.
  template <class Look>
  [[gnu::always_inline]] static void fetch() {
    Of<Look>::fetch();
  }

  // May be called in any thread; takes a lock only if the poller sleeps or has no thread yet.
  //
  // look: called to poll the operation; returns true once it needs no more polling. Must not throw. If it has a method `arrives`, this is
  // called once, before, in the poller's thread.
  // line: operations with the same number, less than 2^63, end in the order in which they are added, so only the first of them is
  // polled; 0: it ends in no such order.
  // patient: the time at which its end is seen matters little, so that polls need not become frequent for it.
  // Throws std::system_error if the process may not have another thread.
  template <class Look>
  void add(Look look, uint64_t line = 0, bool patient = false) {
    put(new Of<Look>(std::move(look), line, patient));
  }

 private:
  // One operation that is polled.
  struct Node {
    Node(uint64_t of_line, bool is_patient) : line(of_line), patient(is_patient) {}
    virtual ~Node() = default;
    virtual bool look() = 0;
    virtual void arrives() = 0;
    const uint64_t line;
    const bool patient;
    Node* next = nullptr;
  };
  template <class Look>
  struct Of final : Node, InSpareMemory<Of<Look>> {
    Of(Look look, uint64_t line, bool patient) : Node(line, patient), look_(std::move(look)) {}
    bool look() override { return look_(); }
    void arrives() override {
      if constexpr (requires { look_.arrives(); }) look_.arrives();
    }
    Look look_;
  };
  using Lines = std::unordered_map<uint64_t, std::deque<std::unique_ptr<Node>>>;
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kFirst{100}, kSlowest{2000};
  // So many times as long as a poll takes is the pause after it, up to kSlowest.
  static constexpr int kPausesPerPoll = 9;
  static constexpr std::chrono::seconds kPatience{1};
  static constexpr uint64_t kAlone = uint64_t{1} << 63;

  void put(Node* node) {
    node->next = arrived_.load(std::memory_order_relaxed);
    while (!arrived_.compare_exchange_weak(node->next, node)) {
    }
    if (stop_.load()) {
      drop_arrived();
    } else if (!started_.load()) {
      start();
    } else if (asleep_.load()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_one();
    }
  }

  void start() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (thread_.joinable() || stop_.load()) return;
    try {
      thread_ = std::thread([this] {
        begin_();
        loop();
        const std::lock_guard<std::mutex> ending(mutex_);
        running_ = false;
        ended_.notify_all();
      });
    } catch (...) {
      drop_arrived();
      throw;
    }
    running_ = true;
    started_.store(true);
  }

  void drop_arrived() {
    for (Node* node = arrived_.exchange(nullptr); node != nullptr;) delete std::exchange(node, node->next);
  }

  // Put what was added into its line, oldest first; returns whether any of it is impatient.
  bool take(Lines* lines) {
    std::vector<std::unique_ptr<Node>> added;
    bool impatient = false;
    for (Node* node = arrived_.exchange(nullptr); node != nullptr; node = added.back()->next) added.emplace_back(node);
    for (auto node = added.rbegin(); node != added.rend(); ++node) {
      const uint64_t line = (*node)->line != 0 ? (*node)->line : kAlone | ++alone_;
      impatient = impatient || !(*node)->patient;
      (*node)->arrives();
      (*lines)[line].push_back(std::move(*node));
    }
    return impatient;
  }

  void loop() {
    Lines lines;
    std::chrono::microseconds pause = kFirst;
    while (!stop_.load()) {
      const auto began = Clock::now();
      bool moved = take(&lines);
      for (auto line = lines.begin(); line != lines.end();) {
        auto& nodes = line->second;
        for (; !nodes.empty() && nodes.front()->look(); moved = true) nodes.pop_front();
        line = nodes.empty() ? lines.erase(line) : std::next(line);
      }
      pause = moved || lines.empty() ? kFirst : std::min(2 * pause, kSlowest);
      const auto in_proportion = std::chrono::duration_cast<std::chrono::microseconds>(kPausesPerPoll * (Clock::now() - began));
      sleep(std::max(pause, std::min(in_proportion, kSlowest)), lines.empty());
    }
  }

  // Sleep for `pause`, or until something is added.
  void sleep(std::chrono::microseconds pause, bool until_added) {
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.store(until_added);
    if (until_added) {
      wake_.wait(lock, [this] { return stop_.load() || arrived_.load() != nullptr; });
    } else {
      wake_.wait_for(lock, pause, [this] { return stop_.load(); });
    }
    asleep_.store(false);
  }

  const std::function<void()> begin_;
  std::atomic<Node*> arrived_{nullptr};
  std::atomic<bool> stop_{false};
  std::atomic<bool> started_{false};
  std::atomic<bool> asleep_{false};
  bool running_ = false;
  uint64_t alone_ = 0;  // used only by the thread
  std::mutex mutex_;
  std::condition_variable wake_, ended_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace commwatch
