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
template <class Node, int kKind = 0>
class Spare {
 public:
  // Most nodes that wait for a thread to take them: none under the address sanitizer, so that it sees each use of a node that was given back.
#ifdef __SANITIZE_ADDRESS__
  static constexpr int kMost = 0;
#else
  static constexpr int kMost = 1024;
#endif

  // Returns null if there is none.
  static Node* take() {
    Node*& mine = taken();
    if (mine == nullptr) take_all(&mine);
    return mine != nullptr ? std::exchange(mine, mine->next) : nullptr;
  }

  // This thread will soon take a node, of so many bytes. The thread that gave it back may have written it on another core.
  template <size_t kBytes>
  [[gnu::always_inline]] static void fetch() {
    fetch(reinterpret_cast<char*>(taken()), std::make_index_sequence<(kBytes + kCacheLine - 1) / kCacheLine>());
  }

  // Returns false if enough nodes are kept: the caller destroys this one.
  static bool give(Node* node) {
    if (number_.load(std::memory_order_relaxed) >= kMost) return false;
    number_.fetch_add(1, std::memory_order_relaxed);
    push(node);
    return true;
  }

 private:
  static constexpr size_t kCacheLine = 64;

  // Inlined, and not a loop: GCC removes calls and loops that do nothing but this.
  template <size_t... kLine>
  [[gnu::always_inline]] static void fetch(const char* node, std::index_sequence<kLine...>) {
    if (node != nullptr) (__builtin_prefetch(node + kLine * kCacheLine, 1), ...);
  }

  // A thread that ends gives back what it has taken.
  struct GiveBack {
    ~GiveBack() {
      Node*& mine = taken();
      while (mine != nullptr) push(std::exchange(mine, mine->next));
    }
  };

  // The first node that this thread has taken. It has no destructor: each access would check whether that is registered.
  static Node*& taken() {
    static thread_local Node* first = nullptr;
    return first;
  }

  static void take_all(Node** mine) {
    if (back_.load(std::memory_order_relaxed) == nullptr) return;
    static thread_local const GiveBack at_end;
    *mine = back_.exchange(nullptr, std::memory_order_acquire);
    number_.store(0, std::memory_order_relaxed);
  }

  static void push(Node* node) {
    node->next = back_.load(std::memory_order_relaxed);
    while (!back_.compare_exchange_weak(node->next, node, std::memory_order_release, std::memory_order_relaxed)) {
    }
  }

  // Nodes in the lists are never destroyed: an operation may end as late as the process.
  inline static std::atomic<Node*> back_{nullptr};
  inline static std::atomic<int> number_{0};  // of those in `back_`, about: threads take all at once, and do not count them
};

// Memory of an object that was destroyed.
template <class T>
struct SpareBlock {
  SpareBlock* next;
};

// Allocates memory for single objects of a type, and keeps it. For std::allocate_shared, which allocates the object together with its counts of
// references.
template <class T, class Object = T>
struct SpareMemory {
  using value_type = T;
  template <class Other>
  struct rebind {
    using other = SpareMemory<Other, Object>;
  };

  SpareMemory() = default;
  template <class Other>
  SpareMemory(const SpareMemory<Other, Object>&) {}

  // This thread will soon allocate an object.
  [[gnu::always_inline]] static void fetch() { Blocks::template fetch<kSize>(); }

  T* allocate(size_t number) {
    static_assert(sizeof(T) <= kSize && alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
    if (number == 1) {
      if (Block* const block = Blocks::take()) return reinterpret_cast<T*>(block);
    }
    return static_cast<T*>(::operator new(number == 1 ? kSize : number * sizeof(T)));
  }

  void deallocate(T* object, size_t number) {
    if (number != 1 || !Blocks::give(new (object) Block)) ::operator delete(object);
  }

  template <class Other>
  bool operator==(const SpareMemory<Other, Object>&) const {
    return true;
  }

 private:
  using Block = SpareBlock<Object>;
  using Blocks = Spare<Block>;
  // Beside the object, a pointer to virtual functions and two counts, of up to a word each.
  static constexpr size_t kSize = sizeof(Object) + 3 * sizeof(void*);
};

// Base of a type whose objects use such memory.
template <class T>
struct InSpareMemory {
  [[gnu::always_inline]] static void fetch() { SpareMemory<T>::fetch(); }
  static void* operator new(size_t) { return SpareMemory<T>().allocate(1); }
  static void operator delete(void* object) { SpareMemory<T>().deallocate(static_cast<T*>(object), 1); }
};

}  // namespace commwatch
