// Tests the lists of objects and memory that are used again.
#include "spare.h"

#include <memory>
#include <set>

#include "check.h"

namespace {

using namespace commwatch;

struct Node {
  Node* next = nullptr;
};
using Nodes = Spare<Node>;

void test_nodes() {
  CHECK(Nodes::take() == nullptr, "spare: at first there is none");
  std::set<Node*> kept;
  for (int i = 0; i < Nodes::kMost; ++i) {
    auto* const node = new Node;
    CHECK(Nodes::give(node), "spare: as many as kMost are kept");
    kept.insert(node);
  }
  Node more;
  CHECK(!Nodes::give(&more), "spare: one more is left to the caller");
  // The thread takes all nodes, uses one, and ends.
  in_threads(1, [&](int) {
    Node* const taken = Nodes::take();
    CHECK(kept.erase(taken) == (Nodes::kMost > 0 ? 1 : 0), "spare: what was given is used again");
    delete taken;
  });
  while (Node* const node = Nodes::take()) {
    CHECK(kept.erase(node) == 1, "spare: each node is taken once, also after the thread that had all of them");
    delete node;
  }
  CHECK(kept.empty(), "spare: no node is lost");
}

// Objects of one thread end in another, as those of operations do.
void test_memory() {
  constexpr int kEach = 20000;
  struct Object : InSpareMemory<Object> {
    explicit Object(int o) : owner(o) {}
    const int owner;
    Object* next = nullptr;
    uint64_t more[8] = {};
  };
  std::atomic<Object*> ended{nullptr};
  std::atomic<int> makers{kThreads}, alive{0};
  in_threads(kThreads + 1, [&](int thread) {
    if (thread < kThreads) {
      for (int i = 0; i < kEach; ++i) {
        const auto shared = std::allocate_shared<Object>(SpareMemory<Object>(), thread);
        auto* const object = new Object(thread);
        alive.fetch_add(1);
        CHECK(shared->owner == thread && object->owner == thread, "spare: memory has one owner at a time");
        object->next = ended.load();
        while (!ended.compare_exchange_weak(object->next, object)) {
        }
      }
      makers.fetch_sub(1);
      return;
    }
    while (makers.load() > 0 || ended.load() != nullptr) {
      for (Object* object = ended.exchange(nullptr); object != nullptr;) {
        delete std::exchange(object, object->next);
        alive.fetch_sub(1);
      }
    }
  });
  CHECK(alive.load() == 0, "spare: every object came to its end");
}

}  // namespace

void test_spare() {
  test_nodes();
  test_memory();
}
