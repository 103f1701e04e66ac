// Keeps objects and memory for use by the next operation.
//
// What the probe makes for an operation is made in the training thread and destroyed in the poller's. Memory of malloc would go back to the
// training thread's heap, by another thread and in small pieces: each allocation of the training thread then takes longer, also its own.
// Takes no lock: what comes back goes to a list, which a thread that has nothing left takes whole. Does not depend on torch.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>
#include <utility>

namespace commwatch {

// Nodes that were given back; a Node has a pointer `next`. All lists are apart: one for each type of node and each `kKind`.
// kBytes: what a node occupies.
template <class Node, size_t kBytes, int kKind = 0>
class Spare {
 public:
  // Most nodes that are kept: none under the address sanitizer, so that it sees each use of a node that was given back.
#ifdef __SANITIZE_ADDRESS__
  static constexpr int kMost = 0;
#else
  static constexpr int kMost = 1024;
#endif

  // Returns null if there is none.
  static Node* take() {
    static thread_local Taken of_thread;
    Node*& mine = of_thread.first;
    if (mine == nullptr && back_.load(std::memory_order_relaxed) != nullptr) mine = back_.exchange(nullptr, std::memory_order_acquire);
    if (mine == nullptr) return nullptr;
    number_.fetch_sub(1, std::memory_order_relaxed);
    Node* const taken = std::exchange(mine, mine->next);
    fetch(mine);
    return taken;
  }

  // Returns false if enough nodes are kept: the caller destroys this one.
  static bool give(Node* node) {
    if (number_.fetch_add(1, std::memory_order_relaxed) >= kMost) {
      number_.fetch_sub(1, std::memory_order_relaxed);
      return false;
    }
    push(node);
    return true;
  }

 private:
  static constexpr size_t kCacheLine = 64;

  // What a thread has taken. A thread that ends gives it back.
  struct Taken {
    Node* first = nullptr;
    ~Taken() {
      while (first != nullptr) push(std::exchange(first, first->next));
    }
  };

  // Another core has written this node: have it here when the next operation takes it.
  static void fetch(Node* node) {
    if (node == nullptr) return;
    for (size_t at = 0; at < kBytes; at += kCacheLine) __builtin_prefetch(reinterpret_cast<char*>(node) + at, 1);
  }

  static void push(Node* node) {
    node->next = back_.load(std::memory_order_relaxed);
    while (!back_.compare_exchange_weak(node->next, node, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

  // Nodes in the lists are never destroyed: an operation may end as late as the process.
  inline static std::atomic<Node*> back_{nullptr};
  inline static std::atomic<int> number_{0};
};

// Allocates memory for single objects of a type, and keeps it. For std::allocate_shared.
template <class T>
struct SpareMemory {
  using value_type = T;

  SpareMemory() = default;
  template <class Other>
  SpareMemory(const SpareMemory<Other>&) {}

  T* allocate(size_t number) {
    static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    if (number == 1) {
      if (Block* const block = Blocks::take()) return reinterpret_cast<T*>(block);
    }
    return static_cast<T*>(::operator new(number * kSize));
  }

  void deallocate(T* object, size_t number) {
    if (number != 1 || !Blocks::give(new (object) Block)) ::operator delete(object);
  }

  template <class Other>
  bool operator==(const SpareMemory<Other>&) const {
    return true;
  }

 private:
  struct Block {
    Block* next;
  };
  static constexpr size_t kSize = sizeof(T) > sizeof(Block) ? sizeof(T) : sizeof(Block);
  using Blocks = Spare<Block, kSize>;
};

// Base of a type whose objects use such memory.
template <class T>
struct InSpareMemory {
  static void* operator new(size_t) { return SpareMemory<T>().allocate(1); }
  static void operator delete(void* object) { SpareMemory<T>().deallocate(static_cast<T*>(object), 1); }
};

}  // namespace commwatch
