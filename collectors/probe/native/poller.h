// A thread that polls operations whose end is not reported, and writes the ring's heartbeat.
//
// It polls often while operations end, less and less often while none does, and sleeps while none is pending.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace commwatch {

class Poller {
 public:
  using Clock = std::chrono::steady_clock;
  // Polls one operation; returns true once it needs no more polling. Must not throw.
  using Look = std::function<bool()>;

  // begin: called once in the thread; beat: at least once a second.
  Poller(std::function<void()> begin, std::function<void()> beat)
      : beat_(std::move(beat)), thread_([this, begin = std::move(begin)] {
          begin();
          loop();
        }) {}

  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  ~Poller() { stop(); }

  // Ends the thread and destroys pending Looks, also those added later. If called in the thread itself (for example by a
  // tensor's finalizer), it does not wait: the thread ends after the call returns.
  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_one();
    if (thread_.joinable() && thread_.get_id() != std::this_thread::get_id()) thread_.join();
    drop_arrived();
  }

  // May be called in any thread; takes a lock only if the poller sleeps.
  void add(Look look) {
    auto* node = new Node{std::move(look), arrived_.load(std::memory_order_relaxed)};
    while (!arrived_.compare_exchange_weak(node->next, node)) {
    }
    if (stop_.load()) {
      drop_arrived();
    } else if (asleep_.load()) {
      const std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_one();
    }
  }

 private:
  struct Node {
    Look look;
    Node* next;
  };
  static constexpr std::chrono::microseconds kFirst{100}, kSlowest{2000};
  static constexpr std::chrono::seconds kBeat{1};

  static Node* next_of(std::unique_ptr<Node> node) { return node->next; }

  void drop_arrived() {
    for (Node* node = arrived_.exchange(nullptr); node != nullptr;) node = next_of(std::unique_ptr<Node>(node));
  }

  void loop() {
    std::vector<Look> pending;
    auto next_beat = Clock::now();
    std::chrono::microseconds pause = kFirst;
    while (!stop_.load()) {
      const auto now = Clock::now();
      if (now >= next_beat) {
        beat_();
        next_beat = now + kBeat;
      }
      bool moved = false;
      for (Node* node = arrived_.exchange(nullptr); node != nullptr; moved = true) {
        pending.push_back(std::move(node->look));
        node = next_of(std::unique_ptr<Node>(node));
      }
      for (size_t i = 0; i < pending.size();) {
        if (pending[i]()) {
          pending[i] = std::move(pending.back());
          pending.pop_back();
          moved = true;
        } else {
          ++i;
        }
      }
      pause = moved ? kFirst : std::min(2 * pause, kSlowest);
      sleep(pending.empty() ? next_beat : std::min(Clock::now() + pause, next_beat), pending.empty());
    }
  }

  void sleep(Clock::time_point until, bool until_woken) {
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.store(until_woken);
    wake_.wait_until(lock, until, [&] { return stop_.load() || (until_woken && arrived_.load() != nullptr); });
    asleep_.store(false);
  }

  std::function<void()> beat_;
  std::atomic<Node*> arrived_{nullptr};
  std::atomic<bool> stop_{false};
  std::atomic<bool> asleep_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace commwatch
