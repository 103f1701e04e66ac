// Reads NCCL's structures as they are in NCCL 2.27 to 2.30 (src/include/device.h there, ncclDevKernelArgs, ncclDevWorkBatch and ncclDevProfiler).
#include "nccl_counters.h"

#include "memory.h"

namespace played {
namespace {

struct Arguments {
  const void* comm;
  uint64_t channels;  // one bit each
  uint8_t storage;
  uint32_t mask;
  void* works;
};

struct Batch {
  uint32_t next : 14, extends : 1, type : 2, function : 15;
  uint32_t offset;
  uint64_t works;  // one bit each
};

}  // namespace

std::shared_ptr<Counters> Counters::of(const void* comm) {
  constexpr size_t kWords = 32;  // the two addresses are among the first members
  const auto* const words = static_cast<CUdeviceptr const*>(comm);
  std::vector<Channel*> found;
  Memory& all = memory();
  const Guard guard(all.mutex);
  for (size_t i = 0; i < kWords && found.size() < 2; ++i) {
    const auto area = all.find(words[i]);
    const bool fits = area != all.areas.end() && area->first == words[i] && area->second.kind == Kind::kHost;
    if (fits && area->second.size >= kChannels * sizeof(Channel)) found.push_back(reinterpret_cast<Channel*>(words[i]));
  }
  return found.size() == 2 ? std::shared_ptr<Counters>(new Counters(found[0], found[1])) : nullptr;
}

Counters::Works Counters::works(const void* args) {
  const auto& arguments = *static_cast<const Arguments*>(args);
  const auto* const batches = reinterpret_cast<const Batch*>(&arguments + 1);
  Works works;
  for (int channel = 0, block = 0; channel < kChannels; ++channel) {
    if ((arguments.channels >> channel & 1) == 0) continue;
    int count = 0;
    for (const Batch* batch = batches + block++;; batch += batch->next) {
      count += __builtin_popcountll(batch->works);
      if (batch->next == 0) break;
    }
    works.emplace_back(channel, count);
  }
  return works;
}

std::vector<uint64_t> Counters::begin(const Works& works, Ns at) {
  std::vector<uint64_t> first;
  for (const auto& [channel, number] : works) {
    first.push_back(count_[channel] + 1);
    for (int i = 0; i < number; ++i) {
      const uint64_t work = ++count_[channel];
      begun_[channel].works[work % kKept].time = device_time(at);
      __atomic_store_n(&begun_[channel].works[work % kKept].counter, work, __ATOMIC_RELEASE);
    }
  }
  return first;
}

void Counters::end(const Works& works, const std::vector<uint64_t>& first, Ns last) {
  for (size_t i = 0; i < works.size(); ++i) {
    const Ns at = i + 1 == works.size() ? last : last - settings().nccl_apart_ns;
    for (uint64_t work = first[i]; work < first[i] + static_cast<uint64_t>(works[i].second); ++work) {
      auto& place = ended_[works[i].first].works[work % kKept];
      place.time = device_time(at);
      __atomic_store_n(&place.counter, work, __ATOMIC_RELEASE);
    }
  }
}

}  // namespace played
