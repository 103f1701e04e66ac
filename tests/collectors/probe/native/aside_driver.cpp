// Tests calls of Python in another thread, with a simulated GIL: a mutex that knows its owner.
#include <pthread.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include "aside.h"
#include "check.h"

namespace {

std::mutex gil;
std::atomic<void*> has_it{nullptr};

}  // namespace

extern "C" void* PyGILState_GetThisThreadState();

namespace {

void take() {
  gil.lock();
  has_it.store(PyGILState_GetThisThreadState());
}

void let_go() {
  has_it.store(nullptr);
  gil.unlock();
}

bool held() { return has_it.load() == PyGILState_GetThisThreadState(); }

}  // namespace

// Found by name, like Python's functions.
#define PYTHON extern "C" __attribute__((visibility("default")))

// As once there has been a sub-interpreter.
PYTHON int PyGILState_Check() { return 1; }

PYTHON void* PyGILState_GetThisThreadState() {
  static thread_local int state;
  return &state;
}

// As before Python 3.12: the state of the thread that has the GIL, in any thread.
PYTHON void* _PyThreadState_UncheckedGet() { return has_it.load(); }

PYTHON void* PyEval_SaveThread() {
  CHECK(held(), "aside: only what is held is released");
  let_go();
  return &gil;
}

PYTHON void PyEval_RestoreThread(void* state) {
  CHECK(state == &gil, "aside: the state comes back");
  take();
}

void test_aside() {
  using namespace commwatch;
  CHECK(WithoutGil::possible(), "aside: Python's functions are found");
  const auto caller = std::this_thread::get_id();
  for (const bool holds : {false, true}) {
    if (holds) take();
    bool asked = false;
    aside([&] {
      take();
      CHECK(std::this_thread::get_id() != caller, "aside: another thread asks");
      sigset_t blocked;
      pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
      CHECK(sigismember(&blocked, SIGTERM) == 1 && sigismember(&blocked, SIGALRM) == 1, "aside: no signal is handled there");
      asked = true;
      let_go();
    });
    CHECK(asked, "aside: the caller waits for the answer");
    CHECK(held() == holds, "aside: the caller has the GIL as before");
    std::string said;
    try {
      aside([] { throw std::runtime_error("no"); });
    } catch (const std::runtime_error& error) {
      said = error.what();
    }
    CHECK(said == "no" && held() == holds, "aside: what is thrown reaches the caller");
    bool gone = false;
    try {
      aside([] { pthread_exit(nullptr); });
    } catch (const PythonIsGone&) {
      gone = true;
    }
    CHECK(gone && held() == holds, "aside: a thread that Python ends is no answer");
    if (holds) let_go();
  }
}
