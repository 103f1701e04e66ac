// Time on the played devices.
//
// Time is real. A piece of work begins when what it comes after is over, and lasts as long as its kind says. Begin and end are
// computed, not measured, so they are exact however busy the machine is. What work does to memory happens at its end.
#pragma once

#include <cuda.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "settings.h"

namespace played {

struct Op;
using OpRef = std::shared_ptr<Op>;

// Work whose end only shows as it happens: a kernel of NCCL's, a function of the host's. Called with the engine's lock.
class Open {
 public:
  virtual ~Open() = default;
  virtual void begun(Op&) {}
  virtual Ns poll(Op& op) = 0;  // its end, or kUnknown; asked whenever something has moved
  virtual std::function<void()> errand() { return {}; }  // after its begin: what has to run without the lock; empty: nothing now
};

// A kernel, a copy, a callback: as it is put on a stream, or kept in a graph.
struct Work {
  CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
  std::string name;
  Ns takes = 0;
  std::function<void()> effect;
  std::function<std::unique_ptr<Open>()> open;  // in place of `takes`
  bool queues = true;                           // takes a place in the device's one queue, if there is only one
  CUgraph child = nullptr;
  CUevent event = nullptr;
  CUDA_KERNEL_NODE_PARAMS kernel{};  // as far as graphs are asked for it
};

// One execution of a piece of work.
struct Op {
  Ns queued = 0, takes = 0, begin = kUnknown, end = kUnknown;
  std::vector<OpRef> after;
  OpRef behind;  // in the one queue: must have begun before
  std::function<void()> effect;
  bool effect_done = true;
  std::unique_ptr<Open> open;
  int device = 0;
  bool replayed = false;
  bool computes = false;  // a kernel that is not NCCL's
};

// Held for everything that concerns streams, events, captures and graphs, unless a comment says otherwise.
std::mutex& lock();
using Guard = std::lock_guard<std::mutex>;

OpRef add(int device, Work work, std::vector<OpRef> after, bool replayed = false);
bool over(const OpRef& op);

void wait_for(const OpRef& op);  // without the lock
void wait_until(Ns at);          // without the lock

// Look again, in all processes: something has moved. The ring of a bell in shared memory, because ranks wait for each other.
void wake();

}  // namespace played
