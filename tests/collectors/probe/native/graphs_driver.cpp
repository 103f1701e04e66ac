// Tests which operations are kept for which CUDA graph.
#include "graphs.h"

#include <algorithm>

#include "check.h"

namespace {

using namespace commwatch;

Captured captured(uint32_t number) { return Captured{nullptr, "group", false, record_of(0, number)}; }

std::vector<uint32_t> numbers(Graphs& graphs, uint64_t graph) {
  std::vector<uint32_t> found;
  graphs.each(graph, [&](const Captured& operation) { found.push_back(operation.record.seq); });
  return found;
}

void test_captures() {
  Graphs graphs;
  CHECK(!graphs.capturing() && !graphs.add(captured(0)), "graphs: without a capture, nothing is added");
  graphs.begin(1);
  CHECK(graphs.capturing() && graphs.add(captured(1)), "graphs: an operation is added to the graph that is captured");
  std::thread([&] { CHECK(graphs.add(captured(2)), "graphs: also in another thread, which runs the backward pass"); }).join();
  graphs.end(1);
  CHECK(!graphs.capturing() && numbers(graphs, 1) == (std::vector<uint32_t>{1, 2}), "graphs: operations are kept in their order");
  graphs.begin(2);
  graphs.begin(3);
  CHECK(graphs.add(captured(3)) && numbers(graphs, 2).empty() && numbers(graphs, 3).size() == 1,
        "graphs: a capture that begins in the same thread replaces one that was broken off");
  graphs.end(2);
  CHECK(graphs.capturing(), "graphs: the end of a capture that was replaced changes nothing");
  graphs.end(3);
  graphs.forget(1);
  CHECK(numbers(graphs, 1).empty() && numbers(graphs, 3).size() == 1, "graphs: a graph that is gone is forgotten, and no other");
}

// Each thread captures its own graphs, and replays those of all others.
void test_captures_in_threads() {
  constexpr uint32_t kEach = 200;
  Graphs graphs;
  std::atomic<int> right{0};
  Meeting meeting(kThreads);
  in_threads(kThreads, [&](int thread) {
    graphs.begin(static_cast<uint64_t>(thread));
    meeting.meet();
    for (uint32_t i = 0; i < kEach; ++i) {
      graphs.add(captured(i));
      numbers(graphs, i % kThreads);
    }
    bool foreign = true;
    std::thread([&] { foreign = graphs.add(captured(0)); }).join();
    CHECK(!foreign, "graphs: in a thread without a capture, beside several captures, the graph is not known");
    meeting.meet();
    graphs.end(static_cast<uint64_t>(thread));
    const auto found = numbers(graphs, static_cast<uint64_t>(thread));
    right.fetch_add(found.size() == kEach && std::is_sorted(found.begin(), found.end()));
  });
  CHECK(right.load() == kThreads && !graphs.capturing(), "graphs: captures of several threads are kept apart");
}

}  // namespace

void test_graphs() {
  test_captures();
  test_captures_in_threads();
}
