// What the plugin offers to the probe in the same process. Times are CLOCK_MONOTONIC, in ns.
//
// An operation of NCCL's belongs to the call of c10d within which it was made. Its times are kept for that call, and the probe
// asks for them. An operation without such a call is given to the probe's sink.
#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

// What NCCL chose, as one number: bits 0 to 3 the algorithm (1 to 7 in the order of `kAlgorithms`, 0 unknown), bits 4 and 5 the protocol (1
// to 3 in the order of `kProtocols`, 0 unknown), bits 6 to 12 the channels. 0: nothing is known, or operations of one call differ. Bit 13: it
// ran in one kernel with operations of other calls, and its times are those of all of them. Bit 14: its times may be those of a later operation.
static const char* const kAlgorithms[] = {"Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"};
static const char* const kProtocols[] = {"LL", "LL128", "Simple"};
enum { kProtocolAt = 4, kChannelsAt = 6, kShared = 1 << 13, kUncertain = 1 << 14 };

// How far apart the kernels of an operation's channels ended, as one number: bits 0 to 6 the channel that ended last, plus 1; the others how many
// µs before it the first channel ended. 0: not known, or there is one channel.
enum { kApartAt = 7 };

// A communicator, as NCCL describes it.
struct commwatch_nccl_comm {
  uint64_t id;
  const char* name;  // may be empty; valid during the call
  int rank, ranks, nodes;
};

// An operation that has ended, or whose end is not known.
struct commwatch_nccl_op {
  const char* func;      // NCCL's name of it, such as AllReduce; a constant
  const char* datatype;  // such as ncclFloat32; a constant
  uint64_t count;        // elements, as NCCL counts them
  int32_t peer;          // of send and recv, a rank of the communicator; else the root
  uint16_t choice;
  int32_t apart;
  uint64_t launch_ns;            // when NCCL began to launch it
  uint64_t begin_ns, end_ns;     // on the GPU; 0: not known
};

// Functions of the probe.
struct commwatch_nccl_sink {
  // Returns a number for this communicator, -1 to ignore its operations. Called in the thread that calls NCCL, once for a communicator.
  int (*group)(const struct commwatch_nccl_comm* comm);
  // Called in any thread. Must neither block nor call NCCL.
  void (*write)(int group, const struct commwatch_nccl_op* op);
};

struct commwatch_nccl_times {
  uint64_t begin_ns, end_ns;  // pending: begin_ns is when a kernel of a replay has begun, 0 if none has
  uint16_t choice;
  int32_t apart;  // of a call with one operation
};

enum commwatch_nccl_state {
  kCallUnknown,  // no operation of NCCL's with known times was made in this call
  kCallPending,  // some have not ended, or not been reported yet
  kCallOver,
};

// What the probe notes of a thread.
struct commwatch_nccl_thread {
  // The call of c10d that it is in: the probe sets a number, unique in this process, before the call, and what was there after it. 0: none. A
  // batch of operations that run later has a number, too, which each of its calls sets.
  uint64_t call;
  uint64_t launch_ns;  // when its latest call of c10d began; 0: it has made none
};

// The calling thread's.
struct commwatch_nccl_thread* commwatch_nccl_here(void);

// Bytes of an element, by NCCL's name of its type, such as ncclBfloat16.
static inline uint64_t commwatch_nccl_size(const char* datatype) {
  return strstr(datatype, "64") != 0 ? 8 : strstr(datatype, "32") != 0 ? 4 : strstr(datatype, "16") != 0 ? 2 : 1;
}

// The number that stands for a call within a replay of its graph. replay: 1 for the first.
static inline uint64_t commwatch_nccl_replay(uint64_t call, uint64_t replay) {
  return (replay & 0xFFFFFF) << 40 | (call & 0xFFFFFFFFFF);
}

// Times of the operations of a call, from the first begin to the last end.
enum commwatch_nccl_state commwatch_nccl_times_of(uint64_t call, struct commwatch_nccl_times* times);

// Where operations without a call go from now on; null: nowhere. The functions must stay callable.
void commwatch_nccl_sink_to(const struct commwatch_nccl_sink* sink);

// Operations without a call that the sink never gets, because too many were under way at a time.
uint64_t commwatch_nccl_lost(void);

#ifdef __cplusplus
}
#endif
