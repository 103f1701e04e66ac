// The engine: it computes begin and end of all work, and two threads let it happen.
//
// `played-engine` does what is due (effects on memory) and asks open work for its end. `played-calls` runs what may take long or
// may call the driver (functions of the host's, NCCL's data). The job's signals reach neither.
#include "engine.h"

#include "report.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <thread>

namespace played {
namespace {

// While something is open, ends may show that no bell announces.
constexpr Ns kIdlePause = 1000000000, kOpenPause = 2000000;

struct Engine {
  std::mutex mutex;
  std::condition_variable moved;
  std::list<OpRef> unresolved;      // in the order in which they were put
  std::vector<OpRef> opens;         // begun, end unknown
  std::multimap<Ns, OpRef> effects;  // by the time at which they are due
  std::map<int, OpRef> queue;       // by device: the last that took its place in the one queue
  Ns wakes_at = 0;                  // when the thread looks again by itself
  std::once_flag started;

  std::mutex errands_mutex;
  std::condition_variable errands_there;
  std::deque<std::function<void()>> errands;
};
Engine& engine() {
  static Engine* one = new Engine;  // never destroyed: the runtime still asks at exit
  return *one;
}

std::atomic<uint32_t>* shared_bell() {
  const std::string path = settings().shm + "/played-bell-" + std::to_string(getuid());
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  void* page = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, 4096) == 0) page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (fd >= 0) close(fd);
  if (page == MAP_FAILED) page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return static_cast<std::atomic<uint32_t>*>(page);
}

std::atomic<uint32_t>& bell() {
  static std::atomic<uint32_t>* const one = shared_bell();
  return *one;
}

void run_due(Ns until) {
  auto& effects = engine().effects;
  while (!effects.empty() && effects.begin()->first <= until) {
    const OpRef op = effects.begin()->second;
    effects.erase(effects.begin());
    op->effect();
    op->effect = nullptr;
    op->effect_done = true;
  }
}

// Compute when it begins, and ends, if that is known of all that it comes after.
bool resolve(const OpRef& op) {
  Ns begin = op->queued;
  for (const OpRef& before : op->after) {
    if (before->end == kUnknown) return false;
    begin = std::max(begin, before->end);
  }
  if (op->behind) {
    if (op->behind->begin == kUnknown) return false;
    begin = std::max(begin, op->behind->begin);
  }
  op->begin = begin;
  op->after.clear();
  op->behind.reset();
  Engine& e = engine();
  if (op->open) {
    op->open->begun(*op);
    e.opens.push_back(op);
    wake();
    return true;
  }
  op->end = begin + op->takes;
  if (op->computes) note_computed(op->begin, op->end);
  if (op->effect) {
    op->effect_done = false;
    e.effects.emplace(op->end, op);
    if (op->end < e.wakes_at) wake();
  }
  return true;
}

void post(std::function<void()> errand) {
  Engine& e = engine();
  const Guard guard(e.errands_mutex);
  e.errands.push_back(std::move(errand));
  e.errands_there.notify_one();
}

// Ask all open work whether it is over; returns whether some is.
bool poll_opens(Ns at) {
  auto& opens = engine().opens;
  const size_t before = opens.size();
  for (const OpRef& op : opens) {
    if (at >= op->begin) {
      if (auto errand = op->open->errand()) post(std::move(errand));
    }
    op->end = op->open->poll(*op);
    if (op->end == kUnknown) continue;
    op->open.reset();
    if (!op->effect) continue;
    op->effect_done = false;
    engine().effects.emplace(op->end, op);
  }
  opens.erase(std::remove_if(opens.begin(), opens.end(), [](const OpRef& op) { return op->end != kUnknown; }), opens.end());
  return opens.size() < before;
}

// Do what is due; returns when to look again. With the lock.
Ns look() {
  Engine& e = engine();
  for (bool again = true; again;) {
    const Ns at = now();
    run_due(at);
    again = poll_opens(at);
    if (!again) break;
    for (auto it = e.unresolved.begin(); it != e.unresolved.end();) it = resolve(*it) ? e.unresolved.erase(it) : std::next(it);
    e.moved.notify_all();
  }
  const Ns at = now();
  Ns next = at + (e.opens.empty() ? kIdlePause : kOpenPause);
  if (!e.effects.empty()) next = std::min(next, e.effects.begin()->first);
  for (const OpRef& op : e.opens) {
    if (op->begin > at) next = std::min(next, op->begin);
  }
  return e.wakes_at = next;
}

void engine_thread() {
  pthread_setname_np(pthread_self(), "played-engine");
  prctl(PR_SET_TIMERSLACK, 1);
  while (true) {
    const uint32_t rung = bell().load();
    Ns next;
    {
      const Guard guard(lock());
      next = look();
    }
    const Ns pause = next - now();
    if (pause <= 0) continue;
    const timespec wait{pause / 1000000000, pause % 1000000000};
    syscall(SYS_futex, &bell(), FUTEX_WAIT, rung, &wait, nullptr, 0);
  }
}

void errand_thread() {
  pthread_setname_np(pthread_self(), "played-calls");
  Engine& e = engine();
  while (true) {
    std::unique_lock<std::mutex> guard(e.errands_mutex);
    e.errands_there.wait(guard, [&] { return !e.errands.empty(); });
    const auto errand = std::move(e.errands.front());
    e.errands.pop_front();
    guard.unlock();
    errand();
    wake();
  }
}

void start() {
  std::call_once(engine().started, [] {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread(engine_thread).detach();
    std::thread(errand_thread).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  });
}

}  // namespace

std::mutex& lock() { return engine().mutex; }

OpRef add(int device, Work work, std::vector<OpRef> after, bool replayed) {
  start();
  Engine& e = engine();
  auto op = std::make_shared<Op>();
  op->queued = now();
  op->device = device;
  op->replayed = replayed;
  op->takes = work.takes;
  op->effect = std::move(work.effect);
  op->computes = work.type == CU_GRAPH_NODE_TYPE_KERNEL && !work.open;
  if (work.open) op->open = work.open();
  for (OpRef& before : after) {
    if (before && (before->end == kUnknown || before->end > op->queued)) op->after.push_back(std::move(before));
  }
  if (settings().one_queue && work.queues) op->behind = std::exchange(e.queue[device], op);
  if (!resolve(op)) e.unresolved.push_back(op);
  return op;
}

bool over(const OpRef& op) {
  if (!op) return true;
  const Ns at = now();
  run_due(at);
  return op->end != kUnknown && op->end <= at && op->effect_done;
}

void wait_for(const OpRef& op) {
  while (true) {
    Ns end;
    {
      std::unique_lock<std::mutex> guard(lock());
      if (over(op)) return;
      end = op->end;
      if (end == kUnknown) engine().moved.wait_for(guard, std::chrono::milliseconds(2));
    }
    if (end != kUnknown) wait_until(end);
  }
}

void wait_until(Ns at) {
  const timespec when{at / 1000000000, at % 1000000000};
  clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &when, nullptr);
}

void wake() {
  bell().fetch_add(1);
  syscall(SYS_futex, &bell(), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace played
