// The operations under way: what is known of each, from its launch until the kernels of all its channels have ended.
//
// Handles are numbers, not addresses: place, generation and channel. A handle of an operation that is over finds nothing.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "commwatch_nccl.h"

#define OPERATIONS 8192
// Places that are looked at for a new operation.
#define LOOKS 16

struct comm;

struct operation {
  atomic_uint_fast32_t generation;  // odd while it is under way
  atomic_uint missing;              // ends that have not come: one for each channel, and that of the launch
  atomic_uint_fast64_t began, ended;  // channels, one bit each
  atomic_bool launched;             // NCCL has launched it
  atomic_uint_fast64_t begin, end;  // first and last, by the GPU's clock
  atomic_uint_fast64_t first_end;   // of its channels
  atomic_uint last;                 // the channel that ended last, plus 1
  _Atomic(struct comm*) comm;       // null while it is made: then it is not to be ended
  uint64_t call;  // of c10d; 0: none, it goes to the sink
  void* group;    // handle of its group
  bool timed;     // its channels report their times
  bool replayed;
  uint64_t number;  // of the communicator's operations
  struct commwatch_nccl_op of;
};

static struct operation operations[OPERATIONS];
static atomic_uint_fast64_t operations_next;

// A new operation, not yet visible by a handle; null if too many are under way.
static inline struct operation* operation_new(void) {
  for (int look = 0; look < LOOKS; ++look) {
    struct operation* const operation = &operations[atomic_fetch_add_explicit(&operations_next, 1, memory_order_relaxed) % OPERATIONS];
    uint_fast32_t generation = atomic_load_explicit(&operation->generation, memory_order_acquire);
    if (generation % 2 == 0 && atomic_compare_exchange_strong(&operation->generation, &generation, generation + 1)) return operation;
  }
  return 0;
}

// Returns the operation's communicator to the first caller, which must end the operation; returns null to all later callers.
static inline struct comm* operation_claim(struct operation* operation) {
  return atomic_exchange_explicit(&operation->comm, 0, memory_order_acq_rel);
}

static inline void operation_free(struct operation* operation) {
  atomic_fetch_add_explicit(&operation->generation, 1, memory_order_release);
}

// -- calls of NCCL's functions, the parents of operations. Those within a capture are the parents of each replay, so they are kept.

#define APIS 8192

struct api {
  atomic_uint_fast64_t generation;  // 0: a thread is writing it
  atomic_uint_fast64_t call;        // of c10d
  atomic_uint_fast64_t launch_ns;   // when it began
  atomic_uint_fast64_t replays;     // of its graph
  _Atomic(void*) theirs;            // handle of the chained plugin
};
static struct api apis[APIS], captured_apis[APIS];
static atomic_uint_fast64_t apis_next, captured_apis_next;

// -- what NCCL runs in one kernel: its group event

struct group {
  atomic_uint_fast64_t generation;
  atomic_uint_fast64_t first;  // the call of c10d of its first operation, or a number of its own; 0: none yet
  atomic_bool shared;          // it has operations of several calls
  _Atomic(void*) theirs;       // handle of the chained plugin
};
static struct group groups[APIS];
static atomic_uint_fast64_t groups_next;

// -- handles: 16 bits of kTag, 3 of the kind, 6 of the channel, 13 of the place, 26 of the generation; no address of this process

#define HANDLE_TAG UINT64_C(0xC7A1)
// For calls of NCCL's functions the channel has two flags: within a call of c10d, and captured into a graph.
enum handle_kind { kOperation = 1, kChannel = 2, kApi = 3, kCapturedApi = 4, kPlan = 5 };
enum { kWithinCall = 1, kCaptured = 2 };

static inline void* handle_of(enum handle_kind kind, unsigned channel, uint64_t place, uint64_t generation) {
  const uint64_t bits = HANDLE_TAG << 48 | (uint64_t)kind << 45 | (uint64_t)(channel & 63) << 39 | (place & 8191) << 26 | (generation & 0x3FFFFFF);
  return (void*)(uintptr_t)bits;
}

static inline bool handle_is(const void* handle, enum handle_kind kind) {
  return (uintptr_t)handle >> 45 == (HANDLE_TAG << 3 | (uint64_t)kind);
}
static inline bool handle_is_ours(const void* handle) { return (uintptr_t)handle >> 48 == HANDLE_TAG; }
static inline unsigned handle_channel(const void* handle) { return (uintptr_t)handle >> 39 & 63; }
static inline unsigned handle_place(const void* handle) { return (uintptr_t)handle >> 26 & 8191; }
static inline uint64_t handle_generation(const void* handle) { return (uintptr_t)handle & 0x3FFFFFF; }

// The operation of a handle of an operation or a channel; null if it is over.
static inline struct operation* operation_of(const void* handle) {
  if (!handle_is(handle, kOperation) && !handle_is(handle, kChannel)) return 0;
  struct operation* const operation = &operations[handle_place(handle)];
  const uint64_t generation = atomic_load_explicit(&operation->generation, memory_order_acquire);
  return (generation & 0x3FFFFFF) == handle_generation(handle) ? operation : 0;
}

static inline struct api* api_place(const void* handle) {
  return handle_is(handle, kApi) ? &apis[handle_place(handle)] : handle_is(handle, kCapturedApi) ? &captured_apis[handle_place(handle)] : 0;
}

struct api_facts {
  uint64_t call, launch_ns;
  void* theirs;
};

// What is known of the API call of a handle; false if newer ones have taken its place.
static inline bool api_read(const void* handle, struct api_facts* facts) {
  struct api* const api = api_place(handle);
  if (api == 0) return false;
  const uint64_t before = atomic_load_explicit(&api->generation, memory_order_acquire);
  facts->call = atomic_load_explicit(&api->call, memory_order_acquire);
  facts->launch_ns = atomic_load_explicit(&api->launch_ns, memory_order_acquire);
  facts->theirs = atomic_load_explicit(&api->theirs, memory_order_acquire);
  return before != 0 && atomic_load_explicit(&api->generation, memory_order_relaxed) == before && (before & 0x3FFFFFF) == handle_generation(handle);
}

// Note a call of NCCL's functions; returns its handle. flags: of handles. theirs: becomes the place for the chained plugin's handle, null if
// another thread is writing there, after thousands of calls: then only the flags are known.
static inline void* api_new(uint64_t call, uint64_t launch_ns, unsigned flags, _Atomic(void*)** theirs) {
  uint64_t number = flags & kCaptured ? atomic_fetch_add_explicit(&captured_apis_next, 1, memory_order_relaxed) : APIS;
  const bool kept = number < APIS;
  if (!kept) number = atomic_fetch_add_explicit(&apis_next, 1, memory_order_relaxed);
  struct api* const api = &(kept ? captured_apis : apis)[number % APIS];
  const uint64_t generation = number / APIS + 2, before = atomic_load_explicit(&api->generation, memory_order_relaxed);
  uint_fast64_t expected = before;
  const bool older = before < generation && (before != 0 || number < APIS);
  if (older && atomic_compare_exchange_strong(&api->generation, &expected, 0)) {
    atomic_store_explicit(&api->call, call, memory_order_relaxed);
    atomic_store_explicit(&api->launch_ns, launch_ns, memory_order_relaxed);
    atomic_store_explicit(&api->replays, 0, memory_order_relaxed);
    atomic_store_explicit(&api->theirs, 0, memory_order_relaxed);
    atomic_store_explicit(&api->generation, generation, memory_order_release);
    *theirs = &api->theirs;
  }
  return handle_of(kept ? kCapturedApi : kApi, flags, number % APIS, generation);
}

static inline void* group_new(_Atomic(void*)** theirs) {
  const uint64_t number = atomic_fetch_add_explicit(&groups_next, 1, memory_order_relaxed), generation = number / APIS + 1;
  struct group* const group = &groups[number % APIS];
  atomic_store_explicit(&group->first, 0, memory_order_relaxed);
  atomic_store_explicit(&group->shared, false, memory_order_relaxed);
  atomic_store_explicit(&group->theirs, 0, memory_order_relaxed);
  atomic_store_explicit(&group->generation, generation, memory_order_release);
  *theirs = &group->theirs;
  return handle_of(kPlan, 0, number % APIS, generation);
}

// The group of a handle; null if newer ones have taken its place.
static inline struct group* group_of(const void* handle) {
  if (!handle_is(handle, kPlan)) return 0;
  struct group* const group = &groups[handle_place(handle)];
  return (atomic_load_explicit(&group->generation, memory_order_acquire) & 0x3FFFFFF) == handle_generation(handle) ? group : 0;
}

// An operation of this call begins in the group; call: unique, also for one without a call.
static inline void group_add(struct group* group, uint64_t call) {
  uint_fast64_t first = 0;
  if (!atomic_compare_exchange_strong(&group->first, &first, call) && first != call) atomic_store(&group->shared, true);
}

// Returns whether the value is larger than what was there.
static inline bool raise_to(atomic_uint_fast64_t* most, uint64_t value) {
  uint_fast64_t seen = atomic_load_explicit(most, memory_order_relaxed);
  while (seen < value && !atomic_compare_exchange_weak_explicit(most, &seen, value, memory_order_relaxed, memory_order_relaxed)) {
  }
  return seen < value;
}

static inline void lower_to(atomic_uint_fast64_t* least, uint64_t value) {
  uint_fast64_t seen = atomic_load_explicit(least, memory_order_relaxed);
  while (seen > value && !atomic_compare_exchange_weak_explicit(least, &seen, value, memory_order_relaxed, memory_order_relaxed)) {
  }
}
