// Tests what has a lifetime: the poller and its Looks, a session with its groups and flights.
#include <fcntl.h>
#include <sys/wait.h>

#include <functional>
#include <map>
#include <set>
#include <string>

#include "check.h"
#include "flight.h"
#include "poller.h"

namespace {

using namespace commwatch;

// -- poller

// Looks that count how often they are called, and how many of them were destroyed.
struct Looks {
  std::atomic<int> made{0}, calls{0}, destroyed{0};

  // Done after so many calls; 0: never.
  std::function<bool()> look(int calls_left) {
    made.fetch_add(1);
    std::shared_ptr<int> left(new int(calls_left), [this](int* over) {
      delete over;
      destroyed.fetch_add(1);
    });
    return [this, left = std::move(left)] {
      calls.fetch_add(1);
      return --*left == 0;
    };
  }
};

void nothing() {}

void test_looks_end() {
  constexpr int kLooks = 500, kMostCalls = 4;
  Looks looks;
  std::atomic<int> expected{0};
  Poller poller(nothing);
  in_threads(kThreads, [&](int) {
    for (int i = 0; i < kLooks; ++i) {
      expected.fetch_add(1 + i % kMostCalls);
      poller.add(looks.look(1 + i % kMostCalls));
    }
  });
  wait_until([&] { return looks.destroyed.load() == kThreads * kLooks; }, "poller: every look comes to its end");
  CHECK(looks.calls.load() == expected.load(), "poller: nothing is looked at once it is over");
}

void test_stop() {
  Looks looks;
  Poller poller(nothing);
  for (int i = 0; i < 100; ++i) poller.add(looks.look(0));
  wait_until([&] { return looks.calls.load() > 0; }, "poller: looks at what is pending");
  poller.stop();
  CHECK(looks.destroyed.load() == 100, "poller: stopping drops what is pending");
  poller.add(looks.look(1));
  CHECK(looks.destroyed.load() == 101, "poller: what comes after the stop is dropped at once");
}

void test_stop_while_adding() {
  for (int round = 0; round < 50; ++round) {
    Looks looks;
    auto poller = std::make_unique<Poller>(nothing);
    in_threads(kThreads + 1, [&](int thread) {
      if (thread == kThreads) return poller->stop();
      for (int i = 0; i < 20 + round; ++i) poller->add(looks.look(i % 3));
    });
    CHECK(looks.destroyed.load() == looks.made.load(), "poller: stopped while threads add, it drops everything once");
    poller.reset();
  }
}

void test_wake() {
  std::atomic<int> began{0}, seen{0};
  Poller poller([&] { began.fetch_add(1); });
  for (int i = 1; i <= 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    poller.add([&] { return seen.fetch_add(1) >= 0; });
    wait_until([&] { return seen.load() == i; }, "poller: adding wakes it");
  }
  CHECK(began.load() == 1, "poller: begins once");
}

// Operations of a line end one after another: the polls of those that wait for their turn would be wasted.
void test_lines() {
  constexpr int kLines = 4, kEach = 1000;
  std::atomic<int> over[kLines + 1] = {}, in_order{0}, calls{0};
  std::atomic<bool> open{false};
  Poller poller(nothing);
  for (int i = 0; i < kEach; ++i) {
    for (int line = 1; line <= kLines; ++line) {
      poller.add(
          [&, line, i] {
            calls.fetch_add(1);
            if (!open.load()) return false;
            in_order.fetch_add(over[line].fetch_add(1) == i);
            return true;
          },
          static_cast<uint64_t>(line));
    }
  }
  std::atomic<bool> alone{false};
  poller.add([&] { return alone.exchange(true) || true; });
  wait_until([&] { return alone.load(); }, "poller: what is in no line waits for no line");
  const int before = calls.load();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(calls.load() - before <= kLines * 500, "poller: only the first of each line is polled");
  open.store(true);
  wait_until([&] { return in_order.load() == kLines * kEach; }, "poller: the operations of a line are polled in their order");
}

void test_look_that_blocks() {
  std::atomic<int> beats{0};
  std::atomic<bool> blocked{false}, free{false}, gone{false};
  Heartbeat heartbeat(nothing, [&] { beats.fetch_add(1); });
  static auto* const poller = new Poller(nothing);  // kept, as a session keeps its own
  poller->add([&, held = std::shared_ptr<int>(new int, [&](int* it) {
                delete it;
                gone.store(true);
              })] {
    blocked.store(true);
    while (!free.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return true;
  });
  wait_until([&] { return blocked.load(); }, "poller: a poll blocks");
  const int before = beats.load();
  wait_until([&] { return beats.load() >= before + 2; }, "heartbeat: beats while a poll blocks");
  poller->stop();
  CHECK(!gone.load(), "poller: stopping it does not wait for a poll that blocks");
  free.store(true);
  wait_until([&] { return gone.load(); }, "poller: the thread drops what is pending once its poll returns");
}

// -- session

// A session with its own ring, in named memory.
class Life {
 public:
  explicit Life(const char* name, uint64_t slots = 4096, bool attached = true) : name_(std::string("/memfd:") + name), slots_(slots) {
    clockid_t clock;
    pthread_getcpuclockid(pthread_self(), &clock);
    session = std::make_unique<Session>(Python{}, clock, 0.005);
    const int fd = memfd_create(name, MFD_CLOEXEC);
    CHECK(ftruncate(fd, static_cast<off_t>(size())) == 0, "session: there is memory");
    file_ = static_cast<char*>(mmap(nullptr, size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    close(fd);
    if (attached) attach();
  }
  void attach() {
    CHECK(session->attach(file_, slots_) == 0, "session: the ring can be mapped");
  }
  ~Life() { munmap(file_, size()); }
  // Number of mappings of the file, without this reader's.
  int mapped() const {
    FILE* maps = fopen("/proc/self/maps", "r");
    char line[4096];
    int found = -1;
    while (fgets(line, sizeof line, maps) != nullptr) found += strstr(line, name_.c_str()) != nullptr;
    fclose(maps);
    return found;
  }
  uint64_t counter(int index) const {
    return __atomic_load_n(reinterpret_cast<uint64_t*>(file_ + format::kCountersAt) + index, __ATOMIC_ACQUIRE);
  }
  Record record(uint64_t n) const {
    Record record;
    memcpy(&record, file_ + format::kRecordsAt + n * format::kRecordSize, sizeof record);
    CHECK(record.stamp == n + 1 && record.stamp2 == n + 1, "session: a record is whole");
    return record;
  }
  Record in_flight_record(int slot) const {
    Record record;
    memcpy(&record, file_ + format::kInFlightAt + slot * format::kRecordSize, sizeof record);
    return record;
  }
  int in_flight() const { return session->ring()->in_flight_now(); }
  std::unique_ptr<Session> session;

 private:
  size_t size() const { return format::kRecordsAt + slots_ * format::kRecordSize + format::kSplitsAreaBytes; }
  const std::string name_;
  const uint64_t slots_;
  char* file_ = nullptr;
};

// Enters a session, as the hook does while it handles an operation.
class Inside {
 public:
  explicit Inside(Session& session) : session_(session) { session_.enter(); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ~Inside() { session_.leave(); }

 private:
  Session& session_;
};

Record head(uint64_t launch_ns, uint32_t seq = 0) {
  Record record;
  record.op = 1;
  record.launch_ns = launch_ns;
  record.seq = seq;
  return record;
}

std::shared_ptr<Flight> launch(Session& session, Queue& queue, uint64_t at, bool p2p = false) {
  return std::make_shared<Flight>(session, queue, p2p, true, 0, head(at));
}

void test_groups() {
  Life life("groups");
  Session& session = *life.session;
  constexpr int kGroups = 40, kRounds = 500;
  const std::vector<char> addresses(kGroups);  // of one bucket or two
  std::vector<std::map<int, Group*>> seen(kThreads);
  Meeting all(kThreads);
  in_threads(kThreads, [&](int thread) {
    const Inside inside(session);
    for (int i = 0; i < kGroups * kRounds; ++i) {
      const int which = i % kGroups;
      if (i < kGroups) all.meet();  // all threads look it up first
      const void* address = &addresses[which];
      const std::string name = std::to_string(which);
      Group* group = session.find(address, name);
      if (group == nullptr) group = session.add(std::make_unique<Group>(address, name));
      CHECK(group->address == address && group->name == name, "groups: what is found is what was asked for");
      group->next_seq.fetch_add(1);
      Group*& known = seen[thread][which];
      CHECK(known == nullptr || known == group, "groups: a group stays itself");
      known = group;
    }
  });
  for (int which = 0; which < kGroups; ++which) {
    for (int thread = 1; thread < kThreads; ++thread) CHECK(seen[thread][which] == seen[0][which], "groups: one for all threads");
    CHECK(seen[0][which]->next_seq.load() == uint32_t{kThreads} * kRounds, "groups: all count in the same");
  }
  const Inside inside(session), another(session);
  const void *of_2 = seen[0][2]->address, *of_3 = seen[0][3]->address, *of_4 = seen[0][4]->address;
  session.forget("3");
  CHECK(session.find(of_3, "3") == nullptr && session.find(of_2, "2") == seen[0][2], "groups: one is forgotten by name");
  CHECK(session.add(std::make_unique<Group>(of_3, "3")) != seen[0][3], "groups: what is made anew is another");
  session.add(std::make_unique<Group>(of_4, "later"));
  CHECK(session.find(of_4, "4") == nullptr, "groups: what is at the place of another has come after its end");
  session.close();
}

// Groups are created again and again while threads use them and count in them.
void test_groups_made_anew() {
  constexpr int kRounds = 3000;
  Life life("anew", 1 << 16);
  Session& session = *life.session;
  std::atomic<uint64_t> counted{0};
  in_threads(kThreads, [&](int thread) {
    for (int i = 0; i < kRounds; ++i) {
      const Inside inside(session);
      const std::string name = std::to_string(i % 5);
      if (thread == 0) session.forget(name);
      if (!session.has_room()) continue;
      Group* group = session.find(&session, name);
      if (group == nullptr) group = session.add(std::make_unique<Group>(&session, name));
      if (i % 7 == 0) {
        launch(session, group->collectives, now_ns())->finish(now_ns(), format::kByFuture);
      } else {
        group->count(head(now_ns()), false);
        counted.fetch_add(1);
      }
    }
  });
  session.close();
  uint64_t written = 0;
  for (uint64_t n = 0; n < life.counter(format::kCursor); ++n) {
    const Record record = life.record(n);
    if (record.timing == format::kCounted) written += record.waited_us;
  }
  CHECK(written == counted.load(), "anew: what was counted in a group that is over is written down");
}

void test_room_for_groups() {
  Life life("room");
  Session& session = *life.session;
  Queue queue;
  const auto made_anew = [&] {
    const Inside inside(session);
    if (!session.has_room()) return false;
    session.add(std::make_unique<Group>(&session, "g"));
    session.forget("g");
    return true;
  };
  for (int i = 0; i < 5000; ++i) CHECK(made_anew(), "room: for any number, one after another");
  auto flight = launch(session, queue, now_ns());
  int made = 0;
  while (made < 5000 && made_anew()) ++made;
  CHECK(made == 1024, "room: while an operation is in flight nothing is freed, and that has a bound");
  flight.reset();
  CHECK(made_anew(), "room: there is again once it is over");
  session.close();
}

// 8 threads launch; each flight is ended by another thread, by the poller, by none, or by several at once.
void test_flights() {
  constexpr int kFlights = 400;
  Life life("flights");
  Session& session = *life.session;
  Queue queue;
  std::vector<std::vector<std::shared_ptr<Flight>>> handed(kThreads);
  Meeting all(kThreads);
  in_threads(kThreads, [&](int thread) {
    for (int i = 0; i < kFlights; ++i) {
      auto flight = launch(session, queue, now_ns(), i % 2 == 1);
      if (i % 3 == 0) flight->watch(now_ns());
      if (i % 4 == 0) {
        handed[thread].push_back(flight);
      } else if (i % 4 == 1) {
        session.poller().add([flight, looks = 0]() mutable {
          if (++looks < 3) return false;
          flight->finish(now_ns(), format::kByPoll);
          return true;
        });
      } else if (i % 4 == 2) {
        flight->wait_begins();
        flight->finish(now_ns(), format::kByWait, i % 8 == 2 ? format::kFailed : 0);
      }
    }
    all.meet();
    for (auto& flight : handed[(thread + 1) % kThreads]) flight->finish(now_ns(), format::kByFuture);
    for (auto& flight : handed[(thread + 2) % kThreads]) flight->finish(now_ns(), format::kByWait, format::kFailed);
  });
  handed.clear();
  wait_until([&] { return life.counter(format::kCursor) == uint64_t{kThreads} * kFlights; }, "flights: each makes a record");
  wait_until([&] { return life.in_flight() == 0; }, "flights: none is in flight at the end");
  std::map<std::pair<int, int>, int> ends;
  for (int n = 0; n < kThreads * kFlights; ++n) {
    const Record record = life.record(n);
    CHECK(record.launch_ns <= record.start_ns && record.start_ns <= record.end_ns, "flights: launch, start and end follow");
    ++ends[{record.timing, record.flags & format::kUntimed}];
  }
  constexpr int kQuarter = kThreads * kFlights / 4;
  CHECK((ends[{format::kByPoll, 0}] == kQuarter), "flights: the poller ends its own");
  CHECK((ends[{format::kByNone, format::kUntimed}] == kQuarter), "flights: what nobody saw end has no duration");
  CHECK((ends[{format::kByFuture, 0}] + ends[{format::kByWait, 0}] == 2 * kQuarter), "flights: whoever is first ends it");
  session.exposure.take(now_ns());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(session.exposure.take(now_ns()) == 0, "flights: the exposed time has an end for each begin");
  session.close();
}

void test_wait_after_the_end() {
  Life life("wait");
  Queue queue;
  auto flight = launch(*life.session, queue, now_ns(), true);
  flight->finish(now_ns(), format::kByPoll);
  auto next = launch(*life.session, queue, now_ns(), true);  // in the same slot of the table
  flight->wait_begins();
  CHECK((life.in_flight_record(0).flags & format::kBlocked) == 0, "wait: one for what is over does not block what has its place");
  next.reset();
  life.session->exposure.take(now_ns());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(life.session->exposure.take(now_ns()) == 0, "wait: one for what is over does not count as in flight");
  flight.reset();
  // Many times, so that the end and the wait coincide.
  for (int round = 0; round < 2000; ++round) {
    auto racing = launch(*life.session, queue, now_ns(), true);
    in_threads(2, [&](int thread) { thread == 0 ? racing->wait_begins() : racing->finish(now_ns(), format::kByPoll); });
  }
  life.session->exposure.take(now_ns());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(life.session->exposure.take(now_ns()) == 0, "wait: one that begins as the operation ends does not stay in flight");
  life.session->close();
}

void test_starts() {
  Life life("starts");
  Queue queue;
  auto first = launch(*life.session, queue, 100), second = launch(*life.session, queue, 150), third = launch(*life.session, queue, 160);
  first->finish(200, format::kByFuture);
  second->finish(300, format::kByFuture);
  third.reset();  // its end was not seen
  launch(*life.session, queue, 250)->finish(350, format::kByFuture);
  launch(*life.session, queue, 400)->finish(500, format::kByFuture);
  launch(*life.session, queue, 410)->finish(450, format::kByFuture);  // overtook the previous one
  launch(*life.session, queue, 420)->finish(600, format::kByFuture);
  const uint64_t expected[] = {100, 200, 160, 300, 400, 450, 500};
  for (int n = 0; n < 7; ++n) {
    if (n != 2) CHECK(life.record(n).start_ns == expected[n], "start: the later of launch and the end of the one before");
  }
  CHECK(life.record(2).flags == format::kUntimed && life.record(2).start_ns >= 300, "start: without an end, nothing moves it");
  first.reset();
  second.reset();
  life.session->close();
}

// 8 threads count while the poller's thread writes the counts.
void test_counts() {
  constexpr int kEach = 20'000;
  Life life("counts", 1 << 20);
  Session& session = *life.session;
  Group* group = [&] {
    const Inside inside(session);
    return session.add(std::make_unique<Group>(&session, "g"));
  }();
  std::atomic<bool> over{false};
  std::thread writer([&] {
    for (int i = 0; i < 200'000 && !over.load(); ++i) group->write_counts(*session.ring(), now_ns());
  });
  in_threads(kThreads, [&](int thread) {
    for (int i = 0; i < kEach; ++i) {
      Record record = head(now_ns(), static_cast<uint32_t>(i));
      record.size_bytes = thread % 2 == 0 ? 4096 : 3000;  // of one size class
      if (thread == 7) record.flags = format::kNoSize, record.size_bytes = 0;
      group->count(record, false);
    }
  });
  over.store(true);
  writer.join();
  session.close();
  uint64_t number = 0, bytes = 0, without = 0;
  for (uint64_t n = 0; n < life.counter(format::kCursor); ++n) {
    const Record record = life.record(n);
    CHECK(record.timing == format::kCounted && (record.flags & format::kUntimed) != 0, "counts: their records say what they are");
    (record.flags & format::kNoSize ? without : number) += record.waited_us;
    bytes += record.size_bytes;
    CHECK(record.size_bytes <= 4096ull * record.waited_us, "counts: number and bytes are of the same moment");
  }
  CHECK(number == 7ull * kEach && without == uint64_t{kEach}, "counts: each is counted once");
  CHECK(bytes == kEach * (4ull * 4096 + 3ull * 3000), "counts: and its bytes");
}

// The numbers of a group's collectives go on at 0, in records and in counts.
void test_numbers_go_on() {
  Life life("numbers");
  Group group(nullptr, "g");
  group.next_seq.store(UINT32_MAX - 1);
  for (const uint32_t expected : {UINT32_MAX - 1, UINT32_MAX, uint32_t{0}, uint32_t{1}}) {
    Record record = head(now_ns(), 77);
    CHECK(&numbered(group, false, &record) == &group.collectives && record.seq == expected, "numbers: 0 comes after the greatest one");
    group.count(record, false);
    group.write_counts(*life.session->ring(), now_ns());
    CHECK(life.record(life.counter(format::kCursor) - 1).seq == expected, "numbers: the latest of those that are counted");
  }
  life.session->close();
}

void test_after_skipped() {
  Life life("skipped");
  Queue queue;
  launch(*life.session, queue, 100)->finish(200, format::kByFuture);
  queue.skipped.store(true);
  launch(*life.session, queue, 250)->finish(400, format::kByFuture);
  launch(*life.session, queue, 300)->finish(500, format::kByFuture);
  queue.skipped.store(true);
  launch(*life.session, queue, 600)->finish(700, format::kByEvents, 0, 650, true);
  CHECK(life.record(0).flags == 0, "skipped: what came before is known");
  CHECK(life.record(1).flags == format::kUntimed, "skipped: when the next one began is not");
  CHECK(life.record(2).flags == 0 && life.record(2).start_ns == 400, "skipped: the one after it began at that one's end");
  CHECK(life.record(3).flags == 0 && life.record(3).start_ns == 650, "skipped: a device's own clock knows all the same");
  life.session->close();
}

void test_close() {
  Life life("close");
  Session& session = *life.session;
  Queue queue;
  std::vector<std::shared_ptr<Flight>> flights;
  for (int i = 0; i < 100; ++i) flights.push_back(launch(session, queue, now_ns()));
  session.poller().add([flight = launch(session, queue, now_ns())] { return false; });
  session.close();
  CHECK(life.counter(format::kClosed) > 0, "close: the ring says so");
  CHECK(life.counter(format::kCursor) == 1 && life.record(0).flags == format::kUntimed, "close: what the poller looked after has no end");
  CHECK(life.mapped() == 1, "close: the mapping stays while anything is in flight");
  in_threads(kThreads, [&](int thread) {
    for (size_t i = thread; i < flights.size(); i += kThreads) {
      if (i % 2 == 0) flights[i]->finish(now_ns(), format::kByFuture);
      flights[i].reset();
    }
  });
  CHECK(life.mapped() == 0, "close: the last one in flight takes the mapping with it");
  CHECK(life.counter(format::kCursor) == 101, "close: those in flight still find their record");
}

// Threads enter and launch while the session is closed, as the hook does it.
void test_close_while_launching() {
  for (int round = 0; round < 100; ++round) {
    Life life("racing");
    std::atomic<Session*> current{life.session.get()};
    std::atomic<uint64_t> launched{0};
    in_threads(kThreads + 1, [&](int thread) {
      if (thread == kThreads) {
        while (round % 2 == 1 && launched.load() < 50) sched_yield();
        return current.exchange(nullptr)->close();
      }
      for (int i = 0; i < 100; ++i) {
        Session* session = life.session.get();
        session->enter();
        if (current.load() == session) {
          Group* group = session->find(&current, "g");
          if (group == nullptr) group = session->add(std::make_unique<Group>(&current, "g"));
          auto flight = launch(*session, group->without_peer[static_cast<uint8_t>(i % 3)], now_ns());
          launched.fetch_add(1);
          if (i % 3 == 0) session->poller().add([flight] { return true; });
          if (i % 3 == 1) flight->finish(now_ns(), format::kByFuture);
        }
        session->leave();
      }
    });
    CHECK(life.mapped() == 0, "close: once all have left, the mapping is gone");
    CHECK(life.counter(format::kCursor) == launched.load(), "close: whoever launched has a record");
  }
}

void test_close_before_the_ring() {
  Life life("early", 4096, false);
  Session& session = *life.session;
  session.enter();  // a thread is in its first operation, and Python creates the ring
  session.close();
  life.attach();
  CHECK(session.ring() == nullptr, "close: a session that is closed before its ring is made has none");
  CHECK(life.counter(format::kClosed) > 0, "close: the ring that comes too late is closed");
  session.leave();
  CHECK(session.over() && life.mapped() == 0, "close: and the mapping is gone");
}

// A session is closed during its first operation, and the poller holds the last reference to the session.
void test_close_in_the_first_operation() {
  for (int round = 0; round < 300; ++round) {
    Life life("first", 4096, false);
    Session& session = *life.session;
    std::atomic<bool> entered{false};
    Queue queue;
    in_threads(2, [&](int thread) {
      if (thread == 1) {
        while (!entered.load()) sched_yield();
        return session.close();
      }
      session.enter();
      entered.store(true);
      life.attach();
      if (session.ring() != nullptr) {
        auto flight = launch(session, queue, now_ns());
        session.poller().add([flight = std::move(flight)] { return true; });
      }
      session.leave();
    });
    wait_until([&] { return session.over() && life.mapped() == 0; }, "close: the last one takes the mapping with it");
    CHECK(life.counter(format::kClosed) > 0, "close: the ring is closed, however late it came");
  }
}

// The poller's thread may release a tensor whose finalizer switches the probe off.
void test_close_in_the_pollers_thread() {
  Life life("own");
  Session& session = *life.session;
  session.poller().add([&session] {
    session.close();
    return true;
  });
  wait_until([&] { return session.over() && life.mapped() == 0; }, "close: may be called in the poller's own thread");
}

void test_fork() {
  Life life("fork");
  Queue queue;
  auto flight = launch(*life.session, queue, now_ns());
  const pid_t child = fork();
  if (child == 0) {
    life.session->let_go();  // as the hook does, by pthread_atfork
    forks.fetch_add(1);
    flight->wait_begins();
    flight.reset();
    _Exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0, "fork: a child can let go of what it inherited");
  CHECK(life.counter(format::kCursor) == 0 && life.in_flight() == 1, "fork: a child writes nothing");
  flight.reset();
  CHECK(life.counter(format::kCursor) == 1, "fork: the parent goes on");
  life.session->close();
}

}  // namespace

void test_poller() {
  test_looks_end();
  test_stop();
  test_stop_while_adding();
  test_wake();
  test_lines();
  test_look_that_blocks();
}

void test_session() {
  test_starts();
  test_groups();
  test_groups_made_anew();
  test_room_for_groups();
  test_flights();
  test_wait_after_the_end();
  test_counts();
  test_numbers_go_on();
  test_after_skipped();
  test_close();
  test_close_while_launching();
  test_close_before_the_ring();
  test_close_in_the_first_operation();
  test_close_in_the_pollers_thread();
  test_fork();
}
