// Runs calls of Python in a separate thread, while the thread that launches an operation waits without the GIL.
//
// Python runs signal handlers in the main thread, whenever that thread runs Python. A handler may raise, and an exception
// raised inside a function that C++ has called is lost. So the main thread runs none of our Python: handlers run when it is
// back in the user's code. This file uses neither torch nor Python's headers.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>

#include <exception>
#include <thread>

namespace commwatch {

// Begin a thread of the probe: block all signals in it, and name it (at most 15 characters) for debuggers.
inline void begin_thread(const char* name) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), name);
}

// Releases the GIL within a scope, if the calling thread holds it.
class WithoutGil {
 public:
  WithoutGil() : state_(held() ? save()() : nullptr) {}
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;
  // Not noexcept: during interpreter shutdown, Python ends a thread that takes the GIL back.
  ~WithoutGil() noexcept(false) {
    if (state_ != nullptr) restore()(state_);
  }

  // Whether this process has the functions. If not, a thread that holds the GIL must not wait for another.
  static bool possible() { return current() != nullptr && of_thread() != nullptr && save() != nullptr && restore() != nullptr; }

 private:
  using State = void* (*)();
  using Restore = void (*)(void*);

  // Not PyGILState_Check, which returns 1 in every thread once there has been a sub-interpreter.
  static bool held() {
    if (!possible()) return false;
    void* const state = current()();
    return state != nullptr && state == of_thread()();
  }

  template <class Function>
  static Function find(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
  }
  // The state of the thread that has the GIL, in newer versions of the calling thread if it has it.
  static State current() {
    static const auto newer = find<State>("PyThreadState_GetUnchecked");
    static const auto found = newer != nullptr ? newer : find<State>("_PyThreadState_UncheckedGet");
    return found;
  }
  static State of_thread() {
    static const auto found = find<State>("PyGILState_GetThisThreadState");
    return found;
  }
  static State save() {
    static const auto found = find<State>("PyEval_SaveThread");
    return found;
  }
  static Restore restore() {
    static const auto found = find<Restore>("PyEval_RestoreThread");
    return found;
  }

  void* const state_;
};

// Python has ended the thread that called it: the interpreter is shutting down.
struct PythonIsGone {};

// Run `ask`, which calls Python, and wait for it. Throws what it throws, PythonIsGone, or std::system_error if no thread
// can be created.
template <class Ask>
void aside(const Ask& ask) {
  if (!WithoutGil::possible()) return ask();
  bool answered = false;
  std::exception_ptr thrown;
  const WithoutGil released;
  std::thread([&] {
    begin_thread("commwatch-ask");
    try {
      ask();
      answered = true;
    } catch (const std::exception&) {  // nothing else: what ends the thread must propagate
      thrown = std::current_exception();
    }
  }).join();
  if (thrown) std::rethrow_exception(thrown);
  if (!answered) throw PythonIsGone{};
}

}  // namespace commwatch
