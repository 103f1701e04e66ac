// Tests what messages cost, and what they take: the maps for many keys, the peers of a group, and their limit.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "session.h"

namespace {

using namespace commwatch;

int compared = 0;

// A key of messages that counts its comparisons.
struct CountedKey : PeerKey {
  bool operator==(const CountedKey& other) const {
    ++compared;
    return PeerKey::operator==(other);
  }
};

std::unique_ptr<Group> group_of(int members) {
  auto group = std::make_unique<Group>(nullptr, "g");
  group->size = members;
  for (int rank = 0; rank < members; ++rank) group->ranks.push_back(rank);
  return group;
}

Record message(int peer, int tag = 0, uint8_t op = 1) {
  Record record;
  record.op = op;
  record.peer = peer;
  record.tag = tag;
  return record;
}

void test_comparisons() {
  for (const int peers : {1, 64, 4096, format::kMostPeers}) {
    for (const int apart : {1, 8, 12, 1000, 4096}) {  // ranks of one node, of one place on each node, ...
      Many<CountedKey, int> many;
      const auto at = [&](int i) -> int& {
        const CountedKey key{{1, i * apart}};
        return many.part(key, peers)[key];
      };
      for (int i = 0; i < peers; ++i) at(i) = i;
      int most = 0, all = 0;
      for (int i = 0; i < peers; ++i) {
        compared = 0;
        CHECK(at(i) == i, "many: a key has its own value");
        most = std::max(most, compared);
        all += compared;
      }
      CHECK(most <= 8 && all <= 2 * peers, "many: a search compares few keys, however many there are");
    }
  }
}

// Nanoseconds of CPU for a message, in rounds over all peers; the least of some.
double cost_of_message(int peers) {
  auto group = group_of(peers);
  double least = 1e9;
  for (int repeat = 0; repeat < 5; ++repeat) {
    timespec begin, end;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    const int messages = 8192;
    for (int i = 0; i < messages; ++i) {
      Record record = message(i % peers);
      numbered(*group, true, &record);
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    least = std::min(least, (static_cast<double>(end.tv_sec - begin.tv_sec) * 1e9 + static_cast<double>(end.tv_nsec - begin.tv_nsec)) / messages);
  }
  return least;
}

void test_cost() {
  CHECK(cost_of_message(4096) < 20 * cost_of_message(64), "messages: what one costs does not grow with the peers");
}

// As many threads send to all peers, with some tags, as there are processors on a small node.
void test_numbers() {
  constexpr int kPeers = 500, kTags = 3, kEach = 4;
  auto group = group_of(kPeers);
  std::vector<std::atomic<uint64_t>> numbers(kPeers * kTags);
  in_threads(kThreads, [&](int) {
    for (int i = 0; i < kEach * kPeers * kTags; ++i) {
      const int which = i % (kPeers * kTags);
      Record record = message(which / kTags, which % kTags * 255);
      numbered(*group, true, &record);
      CHECK(record.peer == which / kTags, "messages: a peer of the group is kept");
      numbers[which].fetch_or(uint64_t{1} << record.seq);
    }
  });
  for (const auto& of_one : numbers) {
    CHECK(of_one.load() == (uint64_t{1} << kThreads * kEach) - 1, "messages: those to one peer with one tag are numbered one by one");
  }
}

void test_limit() {
  constexpr int kMore = 100;
  const auto first_seq = [](Group& group, int peer, uint8_t op, int32_t* recorded) {
    Record record = message(peer, 0, op);
    numbered(group, true, &record);
    *recorded = record.peer;
    return record.seq;
  };
  int32_t recorded;
  {
    auto group = group_of(format::kMostPeers), other = group_of(2);
    CHECK(first_seq(*other, 1, 1, &recorded) == 0 && recorded == 1, "limit: there is room at first");
    for (int peer = 0; peer < format::kMostPeers - 1; ++peer) {
      first_seq(*group, peer, 1, &recorded);
      CHECK(recorded == peer, "limit: each has a place until it is reached");
    }
    for (uint32_t i = 0; i < kMore; ++i) {
      CHECK(first_seq(*group, static_cast<int>(i), 2, &recorded) == i && recorded == -1, "limit: further ones are counted together, without a peer");
    }
    CHECK(first_seq(*other, 0, 1, &recorded) == 0 && recorded == -1, "limit: it holds for all groups of the process");
    CHECK(first_seq(*group, 7, 1, &recorded) == 1 && recorded == 7, "limit: who has a place keeps it");
    CHECK(first_seq(*group, -1, 1, &recorded) == 0 && recorded == -1, "limit: a peer that is not known takes no room");
  }
  auto later = group_of(2);
  CHECK(first_seq(*later, 1, 1, &recorded) == 0 && recorded == 1, "limit: a group that is gone leaves its room");
}

// What is only counted must cost little, too: that is the mode for programs in which all of this costs too much.
void test_kinds() {
  CHECK(CountKey({1, 3, 0}).bits() != CountKey({1, 3, 1}).bits(), "kinds: flags are part of the key");
  Many<CountKey, int> many;
  std::vector<CountKey> keys;
  for (uint8_t op = 1; op <= 2; ++op) {
    for (int8_t size = -1; size < 63; ++size) keys.push_back({op, size, 0});
  }
  std::vector<const void*> parts;
  for (const CountKey& key : keys) {
    auto& part = many.part(key, Group::kKinds);
    part[key] = 1;
    parts.push_back(&part);
  }
  int most = 0;
  for (const void* part : parts) most = std::max(most, static_cast<int>(std::count(parts.begin(), parts.end(), part)));
  CHECK(most <= 8, "kinds: no part has many of them");
  int all = 0;
  many.each([&](const CountKey&, int value) { all += value; });
  CHECK(all == static_cast<int>(keys.size()), "kinds: each is found");
}

}  // namespace

void test_messages() {
  test_comparisons();
  test_cost();
  test_numbers();
  test_limit();
  test_kinds();
}
