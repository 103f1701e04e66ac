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
std::atomic<std::thread::id> owner{};

void take() {
  gil.lock();
  owner.store(std::this_thread::get_id());
}

void let_go() {
  owner.store({});
  gil.unlock();
}

bool held() { return owner.load() == std::this_thread::get_id(); }

}  // namespace

// Found by name, like Python's functions.
extern "C" __attribute__((visibility("default"))) int PyGILState_Check() { return held() ? 1 : 0; }
extern "C" __attribute__((visibility("default"))) void* PyEval_SaveThread() {
  let_go();
  return &gil;
}
extern "C" __attribute__((visibility("default"))) void PyEval_RestoreThread(void* state) {
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
