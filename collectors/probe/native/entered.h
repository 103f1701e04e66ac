// The session that records, for the threads that come from torch or from Python.
#pragma once

#include <atomic>

#include "session.h"

namespace commwatch {

inline std::atomic<Session*> current{nullptr};

// The current session, entered; null while the probe is off.
class Entered {
 public:
  Entered() : session_(current.load()) {
    if (session_ == nullptr) return;
    session_->enter();
    if (current.load() != session_) {
      session_->leave();
      session_ = nullptr;
    }
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  ~Entered() {
    if (session_ != nullptr) session_->leave();
  }
  Session* get() const { return session_; }

 private:
  Session* session_;
};

}  // namespace commwatch
