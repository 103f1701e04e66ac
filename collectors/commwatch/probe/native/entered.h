// The session that records, for the threads that come from torch or from Python.
#pragma once

#include <atomic>

#include "session.h"

namespace commwatch {

inline std::atomic<Session*> current{nullptr};

// The current session, entered; null while the probe is off. Within another one of the same thread: that one's session.
class Entered {
 public:
  Entered() : session_(of_thread()) {
    if (session_ != nullptr) return;
    session_ = current.load();
    if (session_ == nullptr) return;
    session_->enter();
    if (current.load() != session_) {
      session_->leave();
      session_ = nullptr;
      return;
    }
    of_thread() = session_;
    outermost_ = true;
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  ~Entered() {
    if (!outermost_) return;
    of_thread() = nullptr;
    session_->leave();
  }
  Session* get() const { return session_; }

 private:
  static Session*& of_thread() {
    static thread_local Session* session = nullptr;
    return session;
  }

  Session* session_;
  bool outermost_ = false;
};

}  // namespace commwatch
