// A profiler plugin of NCCL's that can stay on: it records when the kernels of each operation began and ended on the GPU, and what NCCL
// chose for it.
//
// Needs only libc. Takes no lock, allocates nothing for an operation, and never makes NCCL wait. If anything is wrong with our own part, NCCL
// goes on without it: no function returns an error.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "calls.h"
#include "chain.h"
#include "commwatch_nccl.h"
#include "gpu_clock.h"
#include "interface.h"
#include "operations.h"

#define MOST_EARLY_NS 1000000
// NCCL keeps the times of 64 operations of each channel. A thread of NCCL's that reads them later finds those of a later operation.
#define KEPT 60
#define API __attribute__((visibility("default")))

// A communicator: the context of NCCL's calls.
struct comm {
  atomic_bool taken;
  atomic_int group;   // of the sink; kNoGroup: not asked yet
  struct commwatch_nccl_comm about;
  char name[64];
  bool ours;             // we record its operations
  atomic_uint_fast64_t begun;  // operations
  atomic_bool eager;  // its latest call was outside of a capture
  atomic_bool odd;       // times that NCCL reports for it may be those of other operations: none is used any more
  int version;           // in which NCCL calls us
  bool broadcasts_break_times;
  int* mask;  // NCCL's
  bool theirs;  // the chained plugin is used for it
  void* theirs_context;
  atomic_flag clock_taken;
  struct gpu_clock clock;
};
enum { kNoGroup = INT_MIN };

// What we ask NCCL for: operations, and the times of their kernels on each channel.
enum { kOurMask = kColl | kP2p | kKernelCh };

static _Atomic(const struct commwatch_nccl_sink*) the_sink;
// Operations for the sink for which there was no place.
static atomic_uint_fast64_t lost;
// In one place, so that a context of another process, which a proxy may have, is told from ours without touching it.
#define COMMS 4096
static struct comm comms[COMMS];
static atomic_int this_process;
// The chained plugin's activation mask; it may change it at any time. NCCL has one for all communicators, too.
static int theirs_mask;
static _Thread_local struct commwatch_nccl_thread here;

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// -- the end of an operation

static void clock_report(struct comm* comm, uint64_t gpu_ns, uint64_t host_ns) {
  if (atomic_flag_test_and_set_explicit(&comm->clock_taken, memory_order_acquire)) return;
  gpu_clock_report(&comm->clock, (int64_t)gpu_ns, (int64_t)host_ns);
  atomic_flag_clear_explicit(&comm->clock_taken, memory_order_release);
}

static uint64_t on_host(struct comm* comm, uint64_t gpu_ns) {
  while (atomic_flag_test_and_set_explicit(&comm->clock_taken, memory_order_acquire)) {
  }
  const int64_t host_ns = gpu_clock_host(&comm->clock, (int64_t)gpu_ns);
  atomic_flag_clear_explicit(&comm->clock_taken, memory_order_release);
  return (uint64_t)host_ns;
}

// Sets the times of an operation, if they can be true.
static void times(struct comm* comm, struct commwatch_nccl_op* of, uint64_t begin, uint64_t end) {
  const uint64_t end_ns = on_host(comm, end), begin_ns = end_ns - (end - begin);
  // Nothing begins before its launch: a little is the error of the clocks' distance, more means that the times are of other operations,
  // because NCCL and its kernels have not counted alike (NVIDIA/nccl #2369).
  const uint64_t early = begin_ns < of->launch_ns ? of->launch_ns - begin_ns : 0;
  if (early > MOST_EARLY_NS) {
    atomic_store_explicit(&comm->odd, true, memory_order_relaxed);
    return;
  }
  of->begin_ns = begin_ns + early;
  of->end_ns = end_ns + early;
}

// How far apart its channels have ended.
static int32_t apart(const struct operation* operation) {
  if ((operation->of.choice >> kChannelsAt & 127) < 2 || operation->of.end_ns == 0) return 0;
  const uint64_t us = (atomic_load_explicit(&operation->end, memory_order_relaxed) - atomic_load_explicit(&operation->first_end, memory_order_relaxed)) / 1000;
  const uint64_t most = INT32_MAX >> kApartAt;
  return (int32_t)((us < most ? us : most) << kApartAt | atomic_load_explicit(&operation->last, memory_order_relaxed));
}

// Hand over what is known of an operation that is over, and free its place.
static void complete(struct operation* operation, bool timed) {
  struct comm* const comm = operation_claim(operation);
  if (comm == 0) return;
  struct commwatch_nccl_op* const of = &operation->of;
  const struct group* const group = group_of(operation->group);
  if (group != 0 && atomic_load_explicit(&group->shared, memory_order_relaxed)) of->choice |= kShared;
  const uint64_t begin = atomic_load_explicit(&operation->begin, memory_order_relaxed);
  const uint64_t end = atomic_load_explicit(&operation->end, memory_order_relaxed);
  of->begin_ns = of->end_ns = 0;
  if (timed && atomic_load_explicit(&comm->begun, memory_order_relaxed) - operation->number >= KEPT) {
    // Operations begin when the host launches them, perhaps long before their kernels, but those of a graph just before their kernels.
    timed = !operation->replayed && operation->call != 0;
    if (timed) of->choice |= kUncertain;
  }
  if (timed && begin <= end && !atomic_load_explicit(&comm->odd, memory_order_relaxed)) times(comm, of, begin, end);
  of->apart = apart(operation);
  if (operation->call != 0) {
    call_ends(operation->call, of->begin_ns, of->end_ns, of->choice & (kShared | kUncertain), of->apart);
  } else {
    const struct commwatch_nccl_sink* const sink = atomic_load_explicit(&the_sink, memory_order_acquire);
    const int number = atomic_load_explicit(&comm->group, memory_order_relaxed);
    if (sink != 0 && number >= 0) sink->write(number, of);
  }
  operation_free(operation);
}

// One of the ends has come.
static void end_came(struct operation* operation) {
  if (atomic_fetch_sub_explicit(&operation->missing, 1, memory_order_acq_rel) != 1) return;
  struct comm* const comm = atomic_load_explicit(&operation->comm, memory_order_acquire);
  if (operation->timed && comm != 0) clock_report(comm, atomic_load_explicit(&operation->end, memory_order_relaxed), now_ns());
  complete(operation, operation->timed);
}

// -- its begin

static unsigned number_of(const char* name, const char* const* names, unsigned count) {
  for (unsigned i = 0; name != 0 && i < count; ++i) {
    if (strcasecmp(name, names[i]) == 0) return i + 1;
  }
  return 0;
}

static uint16_t choice_of(const char* algorithm, const char* protocol, unsigned channels) {
  // NCCL's names are constants, mostly those of the operation before.
  static _Thread_local struct {
    const char *algorithm, *protocol;
    unsigned numbers;
  } last;
  if (algorithm != last.algorithm || protocol != last.protocol) {
    const unsigned algorithms = sizeof kAlgorithms / sizeof *kAlgorithms, protocols = sizeof kProtocols / sizeof *kProtocols;
    last.algorithm = algorithm, last.protocol = protocol;
    last.numbers = number_of(algorithm, kAlgorithms, algorithms) | number_of(protocol, kProtocols, protocols) << kProtocolAt;
  }
  return (uint16_t)(last.numbers | (channels < 127 ? channels : 127) << kChannelsAt);
}

// Whether operations of this communicator without a call of c10d are recorded. May call the probe: only in a thread that calls NCCL.
static bool has_group(struct comm* comm, bool may_ask) {
  const struct commwatch_nccl_sink* const sink = atomic_load_explicit(&the_sink, memory_order_acquire);
  if (sink == 0) return false;
  if (may_ask && atomic_load_explicit(&comm->group, memory_order_relaxed) == kNoGroup) {
    atomic_store_explicit(&comm->group, sink->group(&comm->about), memory_order_relaxed);
  }
  return atomic_load_explicit(&comm->group, memory_order_relaxed) >= 0;
}

// NCCL does not count a broadcast that becomes part of an AllGatherV, but its kernels do: from then on it reads the times of earlier operations.
static bool breaks_times(const struct comm* comm, const char* func) {
  return comm->broadcasts_break_times && (strcmp(func, "Broadcast") == 0 || strcmp(func, "AllGatherV") == 0);
}

// An API call begins: note within which call of c10d.
static void* api_begins(struct comm* comm, const char* func, bool captured, _Atomic(void*)** theirs) {
  atomic_store_explicit(&comm->eager, !captured, memory_order_relaxed);
  if (breaks_times(comm, func)) atomic_store_explicit(&comm->odd, true, memory_order_relaxed);
  const uint64_t call = here.call;
  if (call == 0) has_group(comm, true);
  return api_new(call, now_ns(), (call != 0 ? kWithinCall : 0) | (captured ? kCaptured : 0), theirs);
}

// Whether an operation is recorded, and where it belongs.
struct belonging {
  bool recorded, replayed;
  uint64_t call;       // of c10d; 0: none
  uint64_t launch_ns;  // when NCCL was asked for it; for a replay, now
};

// NCCL counts a replay only while the latest call of the communicator was within a capture, but its kernels count each.
static void replay_begins(struct comm* comm) {
  if (atomic_load_explicit(&comm->eager, memory_order_relaxed)) atomic_store_explicit(&comm->odd, true, memory_order_relaxed);
}

// The number of a call within the replay that begins. parent: its captured API call.
static uint64_t replay_of(const void* parent, uint64_t call) {
  return commwatch_nccl_replay(call, atomic_fetch_add_explicit(&api_place(parent)->replays, 1, memory_order_relaxed) + 1);
}

static struct belonging belongs(struct comm* comm, const void* parent) {
  // NCCL makes the messages of an all-to-all without a call of their own; in a replay, their call of c10d is not known. Version 4 has no calls.
  if (!handle_is(parent, kApi) && !handle_is(parent, kCapturedApi)) return (struct belonging){here.call != 0, false, here.call, here.launch_ns};
  struct api_facts api;
  const unsigned flags = handle_channel(parent);
  const bool known = api_read(parent, &api);
  const bool replayed = flags & kCaptured;
  if (replayed) replay_begins(comm);
  if (flags & kWithinCall && replayed) return (struct belonging){known, true, known ? replay_of(parent, api.call) : 0, now_ns()};
  if (flags & kWithinCall) return (struct belonging){known, false, api.call, api.launch_ns};
  return (struct belonging){has_group(comm, false), replayed, 0, known && !replayed ? api.launch_ns : now_ns()};
}

// Of some messages NCCL does not report all that its kernels count, so that later times are those of other operations: a message to itself, and
// one of which the last channels have no part, as parts are of 4 KiB.
static bool breaks_count(const struct comm* comm, const struct event* event) {
  const unsigned channels = event->p2p.channels;
  const size_t bytes = event->p2p.count * commwatch_nccl_size(event->p2p.datatype), each = channels != 0 ? (bytes + channels - 1) / channels : 0;
  const size_t part = (each + 4095) / 4096 * 4096;
  return event->p2p.peer == comm->about.rank || (bytes != 0 && channels >= 2 && (channels - 1) * part >= bytes);
}

// The channels whose kernels have the times of the operation. 0, messages: there, the thread of a kernel that notes the times may be through
// while others still wait for the peer. On a real GPU, 18 µs were noted for a send that took 637 ms.
static unsigned timed_channels(struct comm* comm, const struct event* event, uint64_t type) {
  if (type == kColl) return event->coll.channels;
  if (breaks_count(comm, event)) atomic_store_explicit(&comm->odd, true, memory_order_relaxed);
  return 0;
}

static void* operation_begins(struct comm* comm, const struct event* event, uint64_t type) {
  const struct belonging belonging = belongs(comm, event->parent);
  const unsigned channels = timed_channels(comm, event, type);
  // NCCL calls us for one operation of a communicator at a time.
  const uint64_t number = atomic_load_explicit(&comm->begun, memory_order_relaxed) + 1;
  atomic_store_explicit(&comm->begun, number, memory_order_relaxed);
  if (belonging.call != 0 && channels == 0) {
    // The times of its call are not known.
    if (belonging.recorded && call_begins(belonging.call, 0)) call_ends(belonging.call, 0, 0, 0, 0);
    return 0;
  }
  struct operation* const operation = belonging.recorded ? operation_new() : 0;
  if (operation == 0) {
    if (belonging.recorded && belonging.call == 0) atomic_fetch_add_explicit(&lost, 1, memory_order_relaxed);
    return 0;
  }
  struct commwatch_nccl_op* const of = &operation->of;
  if (type == kColl) {
    *of = (struct commwatch_nccl_op){event->coll.func, event->coll.datatype, event->coll.count, event->coll.root,
                                     choice_of(event->coll.algo, event->coll.proto, channels), 0, belonging.launch_ns, 0, 0};
  } else {
    *of = (struct commwatch_nccl_op){event->p2p.func, event->p2p.datatype, event->p2p.count, event->p2p.peer, choice_of(0, 0, event->p2p.channels),
                                     0, belonging.launch_ns, 0, 0};
  }
  operation->timed = channels > 0 && channels <= 64;
  operation->replayed = belonging.replayed;
  operation->number = number;
  operation->call = belonging.call;
  if (belonging.call != 0 && !call_begins(belonging.call, of->choice)) {
    operation_free(operation);
    return 0;
  }
  operation->group = type == kColl ? event->coll.group : event->p2p.group;
  struct group* const group = group_of(operation->group);
  // Without a call, an operation has a number of its own: no call is as large.
  if (group != 0) group_add(group, belonging.call != 0 ? belonging.call : UINT64_MAX - (uint64_t)(operation - operations));
  atomic_store_explicit(&operation->launched, false, memory_order_relaxed);
  atomic_store_explicit(&operation->began, 0, memory_order_relaxed);
  atomic_store_explicit(&operation->ended, 0, memory_order_relaxed);
  atomic_store_explicit(&operation->begin, UINT64_MAX, memory_order_relaxed);
  atomic_store_explicit(&operation->end, 0, memory_order_relaxed);
  atomic_store_explicit(&operation->first_end, UINT64_MAX, memory_order_relaxed);
  atomic_store_explicit(&operation->missing, operation->timed ? channels + 1 : 1, memory_order_release);
  atomic_store_explicit(&operation->comm, comm, memory_order_release);
  return handle_of(kOperation, 0, (uint64_t)(operation - operations), atomic_load_explicit(&operation->generation, memory_order_relaxed));
}

// A kernel has begun on a channel.
static void* channel_begins(struct comm* comm, const struct event* event) {
  struct operation* const operation = operation_of(event->parent);
  if (operation == 0 || !operation->timed) return 0;
  const unsigned channel = event->kernel_ch.channel & 63;
  lower_to(&operation->begin, event->kernel_ch.timer);
  const bool first = atomic_fetch_or_explicit(&operation->began, UINT64_C(1) << channel, memory_order_relaxed) == 0;
  if (first) {
    const uint64_t now = now_ns();
    clock_report(comm, event->kernel_ch.timer, now);
    // For a replay, only this shows which of its operations the GPU has reached.
    if (operation->replayed && operation->call != 0) call_runs(operation->call, now);
  }
  return handle_of(kChannel, channel, (uint64_t)(operation - operations), handle_generation(event->parent));
}

// -- NCCL's calls

static void* our_start(struct comm* comm, const struct event* event, uint64_t type, _Atomic(void*)** theirs) {
  if (!comm->ours) return 0;
  switch (type) {
    case kCollApi: return api_begins(comm, event->coll_api.func, event->coll_api.captured, theirs);
    case kP2pApi: return api_begins(comm, event->p2p_api.func, event->p2p_api.captured, theirs);
    case kColl:
    case kP2p: return operation_begins(comm, event, type);
    case kKernelCh: return channel_begins(comm, event);
    case kGroup: return group_new(theirs);
    default: return 0;
  }
}

// NCCL's mask is the union of both.
static int their_mask(struct comm* comm) {
  const int mask = __atomic_load_n(&theirs_mask, __ATOMIC_RELAXED);
  if (mask & ~__atomic_load_n(comm->mask, __ATOMIC_RELAXED)) __atomic_fetch_or(comm->mask, mask, __ATOMIC_RELAXED);
  return mask;
}

// The communicator of an event; null if it is of another process: a proxy thread works for ranks of other processes, too (PXN), and then has their
// context and handles. The chained plugin does not get these events.
static struct comm* comm_of(void* context, const struct event* event) {
  const uintptr_t at = (uintptr_t)context - (uintptr_t)comms;
  if (at >= sizeof comms || at % sizeof *comms != 0) return 0;
  if (event->type == kProxyOp && event->proxy_op.pid != atomic_load_explicit(&this_process, memory_order_relaxed)) return 0;
  if ((event->type == kProxyStep || event->type == kNetPlugin) && event->parent == 0) return 0;
  return context;
}

static int start(void* context, void** handle, struct event* event) {
  *handle = 0;
  struct comm* const comm = comm_of(context, event);
  if (comm == 0) return 0;
  const uint64_t type = event->type;
  _Atomic(void*)* place = 0;
  void* const ours = our_start(comm, event, type, &place);
  *handle = ours;
  if (chain.version == 0) return 0;
  const bool wanted = comm->theirs && chain_wants(type, their_mask(comm));
  void* const theirs = wanted ? chain_start(comm->theirs_context, event, comm->version) : 0;
  if (ours == 0) {
    *handle = theirs;
  } else if (handle_is(ours, kChannel)) {
    theirs_of_channel[handle_place(ours)][handle_channel(ours)] = theirs;
  } else if (handle_is(ours, kOperation)) {
    theirs_of_operation[handle_place(ours)] = (struct their_operation){handle_generation(ours), theirs};
  } else if (place != 0) {
    atomic_store_explicit(place, theirs, memory_order_release);
  }
  return 0;
}

// NCCL 2.27 reports no calls of its functions: the parent of an operation is its group. The thread that has called NCCL begins it, when its kernel
// has been launched, or a thread of CUDA's, at a replay.
static int start_v4(void* context, void** handle, struct event* event) {
  struct event later;
  memset(&later, 0, sizeof later);
  memcpy(&later, event, offsetof(struct event, coll.group));
  later.type = *(const uint8_t*)event;
  if (later.type == kColl) later.coll.group = later.parent, later.parent = 0;
  if (later.type == kP2p) later.p2p.group = later.parent, later.parent = 0;
  // As in `replay_begins`; here it is not known what the communicator's latest call was.
  const bool may_be_replay = (later.type == kColl || later.type == kP2p) && here.launch_ns == 0;
  struct comm* const comm = may_be_replay ? comm_of(context, &later) : 0;
  if (comm != 0) atomic_store_explicit(&comm->odd, true, memory_order_relaxed);
  return start(context, handle, &later);
}

// An operation is over with its last end, so the chained plugin is called first.
static int stop(void* handle) {
  void* const theirs = chain.version != 0 ? chain_handle(handle) : 0;
  if (theirs != 0) chain.stop(theirs);
  struct operation* const operation = operation_of(handle);
  if (operation == 0) return 0;
  if (handle_is(handle, kChannel)) {
    const uint64_t channel = UINT64_C(1) << handle_channel(handle);
    if ((atomic_fetch_or_explicit(&operation->ended, channel, memory_order_relaxed) & channel) == 0) end_came(operation);
  } else if (!atomic_exchange_explicit(&operation->launched, true, memory_order_relaxed)) {
    end_came(operation);
  }
  return 0;
}

static int state(void* handle, int state, union state_args* args) {
  void* const theirs = chain.version != 0 ? chain_handle(handle) : 0;
  if (theirs != 0) chain.state(theirs, state, args);
  if (state != kKernelChStop || !handle_is(handle, kChannel)) return 0;
  struct operation* const operation = operation_of(handle);
  if (operation == 0) return 0;
  lower_to(&operation->first_end, args->kernel_ch.timer);
  // One thread of NCCL's reports the channels of an operation.
  if (raise_to(&operation->end, args->kernel_ch.timer)) atomic_store_explicit(&operation->last, handle_channel(handle) + 1, memory_order_relaxed);
  return 0;
}

static int finalize(void* context) {
  struct comm* const comm = context;
  if (comm == 0) return 0;
  if (comm->theirs) chain.finalize(comm->theirs_context);
  for (int i = 0; i < OPERATIONS; ++i) {
    if (atomic_load_explicit(&operations[i].comm, memory_order_acquire) == comm) complete(&operations[i], false);
  }
  comm->ours = comm->theirs = false;
  atomic_store_explicit(&comm->taken, false, memory_order_release);
  return 0;
}

static struct comm* comm_new(void) {
  for (int i = 0; i < COMMS; ++i) {
    if (atomic_load_explicit(&comms[i].taken, memory_order_relaxed) || atomic_exchange(&comms[i].taken, true)) continue;
    struct comm* const comm = &comms[i];
    atomic_store(&comm->eager, false);
    atomic_store(&comm->begun, 0);
    atomic_store(&comm->odd, false);
    atomic_flag_clear(&comm->clock_taken);
    comm->clock = (struct gpu_clock){0, 0, 0};
    return comm;
  }
  return 0;
}

// The version of the NCCL that has this function, such as 23007; 0: not known. A process may have several.
static int nccl_version(log_function log) {
  Dl_info about;
  if (log == 0 || dladdr((void*)(uintptr_t)log, &about) == 0) return 0;
  void* const library = dlopen(about.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  // A program that has NCCL in itself is no library.
  int (*const get)(int*) = (int (*)(int*))dlsym(library != 0 ? library : RTLD_DEFAULT, "ncclGetVersion");
  int version = 0;
  if (get != 0) get(&version);
  if (library != 0) dlclose(library);
  return version;
}

// Whether jobs with this NCCL crash (NVIDIA/nccl #2112) or slow down (#2355) with a plugin that asks for kernels.
static bool is_faulty(int version) { return version == 23003 || version == 23102; }

// Whether this NCCL then reports wrong times (NVIDIA/nccl #2369). NCCL reads the variable once, too.
static bool broadcasts_break_times(int version) {
  const char* const enabled = getenv("NCCL_ALLGATHERV_ENABLE");
  return (version == 0 || version >= 22900) && (enabled == 0 || strcmp(enabled, "0") != 0);
}

static atomic_int chain_version;

static void load_chain(void) {
  const char* const theirs = getenv("COMMWATCH_NCCL_CHAIN");
  chain_load(theirs != 0 && *theirs != 0 ? theirs : "libnccl-profiler.so", chain_version, comms);
}

// Whether the chained plugin is used for this communicator.
static bool chained(struct comm* comm, const char* name, log_function log) {
  static pthread_once_t loaded = PTHREAD_ONCE_INIT;
  pthread_once(&loaded, load_chain);
  if (chain.version == 0) return false;
  const struct commwatch_nccl_comm* const about = &comm->about;
  // It may keep the address of the mask, to change it later.
  return chain_init(&comm->theirs_context, about->id, &theirs_mask, name, about->nodes, about->ranks, about->rank, log) == 0;
}

static int begin(int version, void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, log_function log) {
  *context = 0;
  struct comm* const comm = comm_new();
  if (comm == 0) return 0;
  strncpy(comm->name, name != 0 ? name : "", sizeof comm->name - 1);
  comm->about = (struct commwatch_nccl_comm){id, comm->name, rank, ranks, nodes};
  atomic_store(&comm->group, kNoGroup);
  comm->version = version;
  comm->mask = mask;
  // Without the probe, as in another program that has inherited the environment, NCCL is asked for nothing.
  const int nccl = nccl_version(log);
  comm->ours = atomic_load_explicit(&the_sink, memory_order_acquire) != 0 && !is_faulty(nccl);
  comm->broadcasts_break_times = broadcasts_break_times(nccl);
  atomic_store(&this_process, (int)getpid());
  int first = 0;
  atomic_compare_exchange_strong(&chain_version, &first, version);  // a process may have several NCCLs: that of the first counts
  comm->theirs = chained(comm, name, log);
  __atomic_fetch_or(mask, (comm->ours ? kOurMask : 0) | (comm->theirs ? __atomic_load_n(&theirs_mask, __ATOMIC_RELAXED) : 0), __ATOMIC_RELAXED);
  *context = comm;
  return 0;
}

static int init_v4(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks, int rank, log_function log) {
  return begin(4, context, id, mask, name, nodes, ranks, rank, log);
}
static int init_v5(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, log_function log) {
  return begin(5, context, id, mask, name, nodes, ranks, rank, log);
}
static int init_v6(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, log_function log) {
  return begin(6, context, id, mask, name, nodes, ranks, rank, log);
}

API const struct profiler_v4 ncclProfiler_v4 = {"commwatch", init_v4, start_v4, stop, state, finalize};
API const struct profiler ncclProfiler_v5 = {"commwatch", init_v5, start, stop, state, finalize};
API const struct profiler ncclProfiler_v6 = {"commwatch", init_v6, start, stop, state, finalize};

// -- the probe's calls

API struct commwatch_nccl_thread* commwatch_nccl_here(void) { return &here; }

API enum commwatch_nccl_state commwatch_nccl_times_of(uint64_t call, struct commwatch_nccl_times* times) { return call_times(call, times); }

API void commwatch_nccl_sink_to(const struct commwatch_nccl_sink* sink) { atomic_store_explicit(&the_sink, sink, memory_order_release); }

API uint64_t commwatch_nccl_lost(void) { return atomic_load_explicit(&lost, memory_order_relaxed); }
