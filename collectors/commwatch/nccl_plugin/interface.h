// NCCL's profiler interface, versions 4 to 6, as NCCL publishes it in src/include/plugin/profiler (NCCL 2.27 to 2.32). Earlier versions report no
// times of kernels.
//
// One struct describes an event for all: version 5 widened `type` in place and added the member `group` and the types of API calls, version 6 added types.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { kOldest = 4 };

// Types of events. An activation mask has one bit for each.
enum {
  kGroup = 1 << 0,
  kColl = 1 << 1,
  kP2p = 1 << 2,
  kProxyOp = 1 << 3,
  kProxyStep = 1 << 4,
  kProxyCtrl = 1 << 5,
  kKernelCh = 1 << 6,
  kNetPlugin = 1 << 7,
  kGroupApi = 1 << 8,
  kCollApi = 1 << 9,
  kP2pApi = 1 << 10,
  kKernelLaunch = 1 << 11,
  kCeColl = 1 << 12,
  kCeSync = 1 << 13,
  kCeBatch = 1 << 14,
};

// A state: the kernel of a channel has ended. Its arguments are `timer`.
enum { kKernelChStop = 22 };

struct event {
  uint64_t type;  // version 4: a byte, the lowest
  void* parent;
  int rank;
  union {
    struct {
      const char* func;
      size_t count;
      const char* datatype;
      int root;
      void* stream;
      bool captured;
    } coll_api;
    struct {
      const char* func;
      size_t count;
      const char* datatype;
      void* stream;
      bool captured;
    } p2p_api;
    struct {
      uint64_t seq;
      const char* func;
      const void* send;
      void* recv;
      size_t count;
      int root;
      const char* datatype;
      uint8_t channels;
      uint8_t warps;
      const char* algo;
      const char* proto;
      void* group;  // version 5
    } coll;
    struct {
      const char* func;
      void* buffer;
      const char* datatype;
      size_t count;
      int peer;
      uint8_t channels;
      void* group;  // version 5
    } p2p;
    struct {
      pid_t pid;  // of the process whose operation it is
    } proxy_op;   // as far as it is read
    struct {
      uint8_t channel;
      uint64_t timer;  // the GPU's %globaltimer, in ns
    } kernel_ch;
    struct {
      uint64_t seq;
      const char* func;
      const void* send;
      void* recv;
      size_t count;
      int root;
      const char* datatype;
      const char* sync_strategy;
      bool intra_batch_sync;
      uint32_t batch_size, batches, ce_seq;
      void* stream;
    } ce_coll;  // version 6; the largest
  };
};

union state_args {
  struct {
    uint64_t timer;
  } kernel_ch;
};

typedef void (*log_function)(int level, unsigned long flags, const char* file, int line, const char* format, ...);

// Functions return 0 for success. `init` of version 4 has other arguments.
struct profiler {
  const char* name;
  int (*init)(void** context, uint64_t comm_id, int* mask, const char* comm_name, int nodes, int ranks, int rank, log_function log);
  int (*start)(void* context, void** handle, struct event* event);
  int (*stop)(void* handle);
  int (*state)(void* handle, int state, union state_args* args);
  int (*finalize)(void* context);
};

struct profiler_v4 {
  const char* name;
  int (*init)(void** context, int* mask, const char* comm_name, uint64_t comm_id, int nodes, int ranks, int rank, log_function log);
  int (*start)(void* context, void** handle, struct event* event);
  int (*stop)(void* handle);
  int (*state)(void* handle, int state, union state_args* args);
  int (*finalize)(void* context);
};
