// Maps that only grow: neither reading nor adding takes a lock, and a value stays where it is. Does not depend on torch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace commwatch {

// A map for a few keys, which are searched one after another.
template <class Key, class Value>
class Few {
 public:
  ~Few() {
    for (Node* node = first_.load(); node != nullptr;) delete std::exchange(node, node->next);
  }

  Value& operator[](const Key& key) {
    Value* const found = find(key);
    return found != nullptr ? *found : *add(key).first;
  }

  // Null if there is none.
  Value* find(const Key& key) const {
    Node* const found = find(first_.load(std::memory_order_acquire), nullptr, key);
    return found != nullptr ? &found->value : nullptr;
  }

  // The value of a key, and whether this call added it.
  std::pair<Value*, bool> add(const Key& key) {
    auto added = std::make_unique<Node>(key, first_.load(std::memory_order_acquire));
    Node* checked = nullptr;
    do {
      if (Node* found = find(added->next, checked, key)) return {&found->value, false};  // another thread added it first
      checked = added->next;
    } while (!first_.compare_exchange_weak(added->next, added.get()));
    return {&added.release()->value, true};
  }

  template <class Do>
  void each(Do what) {
    for (Node* node = first_.load(std::memory_order_acquire); node != nullptr; node = node->next) what(node->key, node->value);
  }

 private:
  struct Node {
    Node(const Key& k, Node* n) : key(k), next(n) {}
    const Key key;
    Value value{};
    Node* next;
  };

  static Node* find(Node* from, const Node* until, const Key& key) {
    for (Node* node = from; node != until; node = node->next) {
      if (node->key == key) return node;
    }
    return nullptr;
  }

  std::atomic<Node*> first_{nullptr};
};

// Spreads numbers evenly over the highest bits of the results, also numbers that are apart by a power of two (the finalizer of MurmurHash3).
inline uint64_t mixed(uint64_t bits) {
  bits = (bits ^ bits >> 33) * 0xFF51AFD7ED558CCDu;
  return (bits ^ bits >> 33) * 0xC4CEB9FE1A85EC53u;
}

// A map for many keys: it searches one `Few` of a table, by the key's `bits()`, so what a search takes does not depend on how many keys there are.
// The table has its final size from the first key on, because readers take no lock.
template <class Key, class Value>
class Many {
 public:
  ~Many() { delete table_.load(); }

  // The part of the map that has this key. expected: about how many keys there may be.
  Few<Key, Value>& part(const Key& key, size_t expected) {
    Table* table = table_.load(std::memory_order_acquire);
    if (table == nullptr) table = make(expected);
    return table->parts[mixed(key.bits()) >> (64 - table->bits)];
  }

  template <class Do>
  void each(Do what) {
    Table* const table = table_.load(std::memory_order_acquire);
    for (size_t i = 0; table != nullptr && i < size_t{1} << table->bits; ++i) table->parts[i].each(what);
  }

 private:
  struct Table {
    explicit Table(int b) : bits(b), parts(new Few<Key, Value>[size_t{1} << b]) {}
    const int bits;
    const std::unique_ptr<Few<Key, Value>[]> parts;
  };

  Table* make(size_t expected) {
    int bits = 1;
    while (size_t{1} << bits < expected) ++bits;
    auto made = std::make_unique<Table>(bits);
    Table* other = nullptr;
    return table_.compare_exchange_strong(other, made.get()) ? made.release() : other;
  }

  std::atomic<Table*> table_{nullptr};
};

}  // namespace commwatch
