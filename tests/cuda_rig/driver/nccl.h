// NCCL's kernels, and the collectives that they carry.
#pragma once

#include <map>

#include "engine.h"
#include "nccl_counters.h"

namespace played {

enum class Coll : uint32_t { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kReduce, kAllToAll, kGather, kScatter, kSend, kRecv };

// One call of NCCL's functions. Types and operations have the numbers of nccl.h.
struct NcclCall {
  Coll coll;
  const void* from;
  void* to;
  uint64_t count;
  int type, op, peer;  // peer: of a message; else the root
};

// Where the ranks of a communicator meet: in shared memory. Its layout is in nccl_kernel.cpp.
class Communicator;
std::shared_ptr<Communicator> meet(uint64_t id, int rank, int ranks);
void give_up(Communicator& communicator);  // its kernels end, whether or not the other ranks come

using MakeOpen = std::function<std::unique_ptr<Open>()>;
// counters: null if they are not found; works: what is counted there.
MakeOpen nccl_kernel(const std::string& name, std::shared_ptr<Communicator> communicator, std::vector<NcclCall> calls,
                     std::shared_ptr<Counters> counters, Counters::Works works);

// What makes a kernel with these arguments open. Empty: its calls are unknown, and it takes a fixed time.
MakeOpen nccl_work(const std::string& name, const void* args);

}  // namespace played
