// Measures for how long the compute stream of a GPU waits for communication, by events before and after each wait.
//
// A stream waits for an event that was recorded on another stream. PyTorch uses one function of the CUDA runtime for all such waits: those
// of Works, DDP's reducer, FSDP and compiled code. Streams of communication are those on which an operation records events.
// Does not depend on torch; the caller makes the GPU current.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "spare.h"

namespace commwatch {

// A bounded set of addresses. Takes no lock; adding to a full set forgets another address.
template <size_t kBits>
class Addresses {
 public:
  bool has(const void* address) const {
    for (size_t i = 0; i < kWindow; ++i) {
      if (is(at(address, i), address)) return true;
    }
    return false;
  }

  // Have what the other functions need of an address in this core's cache, a little later.
  [[gnu::always_inline]] void fetch(const void* address) const { __builtin_prefetch(&at(address, 0), 1); }

  void add(const void* address) {
    if (has(address)) return;
    for (size_t i = 0; i < kWindow; ++i) {
      const void* nothing = nullptr;
      if (is(at(address, i), nullptr) && at(address, i).compare_exchange_strong(nothing, address)) return;
    }
    at(address, turn_.fetch_add(1, std::memory_order_relaxed) % kWindow).store(address);
  }

  void remove(const void* address) {
    for (size_t i = 0; i < kWindow; ++i) {
      const void* found = address;
      if (is(at(address, i), address)) at(address, i).compare_exchange_strong(found, nullptr);
    }
  }

 private:
  static constexpr size_t kWindow = 8;  // a cache line

  static size_t place(const void* address, size_t i) {
    const auto mixed = (reinterpret_cast<uint64_t>(address) >> 3) * 0x9E3779B97F4A7C15ULL;
    return (mixed >> (64 - kBits)) / kWindow * kWindow + i;
  }
  // Looking first is cheap; an exchange takes the cache line from all other threads even if it fails.
  static bool is(const std::atomic<const void*>& place, const void* address) { return place.load(std::memory_order_relaxed) == address; }
  std::atomic<const void*>& at(const void* address, size_t i) { return all_[place(address, i)]; }
  const std::atomic<const void*>& at(const void* address, size_t i) const { return all_[place(address, i)]; }

  alignas(kWindow * sizeof(void*)) std::atomic<const void*> all_[size_t{1} << kBits] = {};
  std::atomic<size_t> turn_{0};
};

// Functions of the CUDA runtime; 0 is success.
struct CudaEvents {
  int (*create)(void** event, unsigned flags);
  int (*destroy)(void* event);
  int (*record)(void* event, void* stream);
  int (*record_with)(void* event, void* stream, unsigned flags);  // null before CUDA 11.1
  int (*query)(void* event);
  int (*elapsed)(float* ms, void* begin, void* end);
  int (*wait)(void* stream, void* event, unsigned flags);
  int (*capturing)(void* stream, int* status);
  int (*last_error)();

  static constexpr int kNotReady = 600;
};

// What a process knows of its streams and events, and events to use again; never destroyed, like the handles of CUDA.
struct Handles {
  Addresses<6> streams;  // of communication
  Addresses<12> events;  // recorded on them
  std::atomic<void*> spare[512] = {};
  std::atomic<size_t> turn{0};  // where to look first
};

class StreamWaits {
 public:
  static constexpr int64_t kUnknown = -1;

  // A wait of the compute stream: the events before and after it.
  class Wait : public InSpareMemory<Wait> {
   public:
    explicit Wait(StreamWaits& all) : begin(all.event()), end(all.event()), all_(all) { all_.pending_.fetch_add(1); }
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;
    ~Wait() {
      all_.pending_.fetch_sub(1);
      all_.give_back(begin);
      all_.give_back(end);
    }

    void* const begin;
    void* const end;

   private:
    StreamWaits& all_;
  };

  // From now on waits are measured. Both outlive this object.
  void begin(const CudaEvents& cuda, Handles& handles) {
    handles_.store(&handles);
    cuda_.store(&cuda);
  }

  // Nothing is measured any more.
  void stop() { stopped_.store(true); }

  bool begun() const { return cuda_.load() != nullptr || stopped_.load(); }
  bool measures() const { return cuda_.load() != nullptr && !stopped_.load(); }

  // The stream on which this process computes; at first the default stream.
  void compute_on(const void* stream) {
    if (compute_.exchange(stream) != stream && measures()) handles_.load()->streams.remove(stream);
  }
  bool is_compute(const void* stream) const { return stream == compute_.load(std::memory_order_relaxed); }

  // `recorded` or `counts` will soon be called with this event.
  [[gnu::always_inline]] void fetch(const void* event) const {
    if (measures()) handles_.load()->events.fetch(event);
  }

  // An event was recorded. in_operation: by an operation of communication.
  void recorded(const void* event, const void* stream, bool in_operation) {
    if (!measures()) return;
    Handles& known = *handles_.load();
    const bool compute = is_compute(stream);
    if (in_operation && !compute) known.streams.add(stream);
    if (!compute && known.streams.has(stream)) {
      known.events.add(event);
    } else {
      known.events.remove(event);
    }
  }

  // Whether `stream` is the compute stream, and is about to wait for communication.
  bool counts(void* stream, const void* event) const {
    if (!measures() || !is_compute(stream) || !handles_.load()->events.has(event)) return false;
    int status = 0;
    const CudaEvents& cuda = *cuda_.load();
    if (cuda.capturing(stream, &status) == 0) return status == 0;
    cuda.last_error();  // clear our error, so that torch's next check does not report it
    return false;
  }

  // Call it before the wait; null if the wait cannot be measured.
  std::unique_ptr<Wait> begins(void* stream) {
    if (pending_.load() >= kMostPending) {
      missed();
      return nullptr;
    }
    auto wait = std::make_unique<Wait>(*this);
    if (wait->begin == nullptr || wait->end == nullptr || !works(cuda_.load()->record(wait->begin, stream))) return nullptr;
    return wait;
  }

  // Call it after the wait; returns false if the wait cannot be measured.
  bool ends(const Wait& wait, void* stream) { return works(cuda_.load()->record(wait.end, stream)); }

  // Whether the wait is over, or cannot be measured. Adds its time.
  bool look(const Wait& wait) {
    if (stopped_.load()) return true;
    const int status = cuda_.load()->query(wait.end);
    if (status == CudaEvents::kNotReady) {
      cuda_.load()->last_error();
      return false;
    }
    float ms = -1;
    if (works(status) && works(cuda_.load()->elapsed(&ms, wait.begin, wait.end))) add(ms);
    return true;
  }

  // An operation has run on the compute stream itself; its time is known, if it is finite and not negative.
  void add(double ms) {
    if (!std::isfinite(ms) || ms < 0) return missed();
    waited_ns_.fetch_add(static_cast<int64_t>(ms * 1e6));
  }

  // Something was not measured.
  void missed() { missed_.store(true); }

  // Returns for how long the compute stream has waited, in ns, in the waits that ended since the last call.
  int64_t take() {
    const int64_t waited = waited_ns_.exchange(0);
    return missed_.exchange(false) || !measures() ? kUnknown : waited;
  }

 private:
  static constexpr size_t kSpare = sizeof(Handles::spare) / sizeof(Handles::spare[0]), kLooks = 8;
  static constexpr int kMostPending = 4096;

  // A call that failed says that the GPU or its driver is in trouble: leave it alone.
  bool works(int status) {
    if (status == 0) return true;
    cuda_.load()->last_error();
    stop();
    return false;
  }

  void* event() {
    Handles& known = *handles_.load();
    for (size_t i = 0; i < kLooks; ++i) {
      auto& slot = known.spare[known.turn.fetch_sub(1) % kSpare];
      if (slot.load(std::memory_order_relaxed) == nullptr) continue;
      if (void* const found = slot.exchange(nullptr)) return found;
    }
    void* made = nullptr;
    return works(cuda_.load()->create(&made, 0)) ? made : nullptr;
  }

  void give_back(void* event) {
    if (event == nullptr) return;
    Handles& known = *handles_.load();
    for (size_t i = 0; i < kLooks; ++i) {
      void* nothing = nullptr;
      if (known.spare[(known.turn.fetch_add(1) + 1) % kSpare].compare_exchange_strong(nothing, event)) return;
    }
    if (!stopped_.load()) cuda_.load()->destroy(event);
  }

  std::atomic<const CudaEvents*> cuda_{nullptr};
  std::atomic<Handles*> handles_{nullptr};
  std::atomic<bool> stopped_{false};
  std::atomic<bool> missed_{false};
  std::atomic<const void*> compute_{nullptr};
  std::atomic<int64_t> waited_ns_{0};
  std::atomic<int> pending_{0};
};

}  // namespace commwatch
