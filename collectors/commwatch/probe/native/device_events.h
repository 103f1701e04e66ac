// Events of a device that are used again.
#pragma once

#include <c10/core/Event.h>

#include <memory>
#include <stdexcept>

#include "runtime.h"
#include "spare.h"

namespace commwatch {

// Reuses events, because creating and destroying one takes locks in the driver.
class Events {
 public:
  struct Node {
    c10::Event event;
    Node* next = nullptr;
    // The next two are for the poller's thread.
    bool seen_over = false;

    // Whether the device has come to it. Asks the device until it has.
    bool is_over() { return seen_over || (seen_over = event.query()); }

    // Milliseconds from an earlier event to this one, both over and of one device. c10 would ask again whether both are over, and change devices.
    double ms_since(const Node& earlier) const {
      const Runtime& runtime = Runtime::get();
      float ms = 0;
      if (runtime.elapsed == nullptr) return earlier.event.elapsedTime(event);
      if (runtime.elapsed(&ms, earlier.event.eventId(), event.eventId()) == 0) return ms;
      runtime.last_error();  // clear our error, so that torch's next check does not report it
      throw std::runtime_error("the time between two events is unknown");
    }
  };

 private:
  struct GiveBack {
    void operator()(Node* node) const {
      const bool timed = node->event.flag() == kTimed;
      if (!(timed ? Timed::give(node) : Plain::give(node))) delete node;
    }
  };

 public:
  using Event = std::unique_ptr<Node, GiveBack>;

  // This thread will soon record an event.
  [[gnu::always_inline]] static void fetch() { Plain::fetch<sizeof(Node)>(); }

  // Returns an event recorded on `stream`, of this thread's current device.
  static Event record(const c10::Stream& stream, void* handle, bool timed) {
    const auto flag = timed ? kTimed : c10::EventFlag::PYTORCH_DEFAULT;
    std::unique_ptr<Node> node(timed ? Timed::take() : Plain::take());
    if (!node || node->event.device() != stream.device()) node.reset(new Node{c10::Event(stream.device_type(), flag)});
    node->seen_over = false;
    if (!again(*node, handle)) node->event.record(stream);
    return Event(node.release());
  }

 private:
  // Record an event that has been recorded before, without c10's changes of the device; returns false if that failed.
  static bool again(const Node& node, void* stream) {
    void* const event = node.event.eventId();
    const auto record = Runtime::get().record;
    if (event == nullptr || record == nullptr) return false;
    if (record(event, stream) == 0) return true;
    Runtime::get().last_error();
    return false;
  }

  static constexpr c10::EventFlag kTimed = c10::EventFlag::BACKEND_DEFAULT;
  using Plain = Spare<Node, 0>;
  using Timed = Spare<Node, 1>;
};

}  // namespace commwatch
