// Tests how much memory is kept for operations that are watched.
#include "retention.h"

#include <memory>
#include <vector>

#include "check.h"

namespace {

using namespace commwatch;

constexpr uint64_t kHalf = Retention::kMostBytes / 2;

struct Kept : Watch {
  explicit Kept(uint64_t b) : bytes(b) {}
  uint64_t kept_bytes() const override { return bytes; }
  void let_go() override { bytes = 0; }
  uint64_t bytes;
};

void test_oldest_go_first() {
  Retention retention;
  std::vector<std::shared_ptr<Kept>> watches;
  for (const uint64_t bytes : {kHalf, uint64_t{0}, kHalf, kHalf}) watches.push_back(std::make_shared<Kept>(bytes));
  CHECK(retention.add(watches[0]), "retention: the first watch needs a check");
  for (int i = 1; i < 4; ++i) CHECK(!retention.add(watches[i]), "retention: one check is enough for all");
  CHECK(!retention.check(10 * kMs), "retention: the check goes on while something is watched");
  CHECK(watches[0]->bytes == 0 && watches[2]->bytes == kHalf && watches[3]->bytes == kHalf, "retention: what is too much is freed, the oldest first");
  watches[1]->bytes = kHalf;
  CHECK(!retention.check(12 * kMs) && watches[1]->bytes == kHalf, "retention: checks within 5 ms cost nothing");
  CHECK(!retention.check(15 * kMs) && watches[1]->bytes == 0 && watches[2]->bytes == kHalf, "retention: checked again after 5 ms");
  watches.clear();
  CHECK(retention.check(30 * kMs), "retention: the check ends when nothing is watched");
  CHECK(retention.add(std::make_shared<Kept>(0)), "retention: then the next watch needs a check");
}

}  // namespace

void test_retention() { test_oldest_go_first(); }
