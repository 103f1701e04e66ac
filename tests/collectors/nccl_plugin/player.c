// Plays NCCL's calls, as recorder.c has written them, from standard input to the plugin. Arguments: the plugin, the name of its table, and `calls` if each
// API call is within a call of c10d, whose number is its handle. In version 4, which has no API calls, each group is.
//
// The times of a kernel are a thousandth of the recorded ones, and begin when the kernel is played: NCCL's times are not in the future.
#define _GNU_SOURCE
#include <assert.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "commwatch_nccl.h"
#include "interface.h"

enum { kMost = 100000 };
static struct {
  void* handle;
  unsigned long parent;
  uint64_t type, begin, played;  // of an operation: the first recorded time of its kernels, and the time that was played for it
  bool captured;
} things[kMost];
static void* comms[64];
static const struct profiler* profiler;
static bool in_calls, is_v4;

static int group(const struct commwatch_nccl_comm* comm) {
  (void)comm;
  return 1;
}

static void put(int number, const struct commwatch_nccl_op* op) {
  (void)number;
  printf("op %s %lu %ld\n", op->func, (unsigned long)op->count, op->end_ns == 0 ? -1 : (long)(op->end_ns - op->begin_ns));
}

static const struct commwatch_nccl_sink sink = {group, put};

int ncclGetVersion(int* version);
int ncclGetVersion(int* version) {
  *version = 22809;
  return 0;
}

static void log_nothing(int level, unsigned long flags, const char* file, int line, const char* format, ...) {
  (void)level, (void)flags, (void)file, (void)line, (void)format;
}

static uint64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// The played time of a kernel of the operation.
static uint64_t played(unsigned long operation, uint64_t timer) {
  if (things[operation].begin == 0) things[operation].begin = timer, things[operation].played = now_ns();
  return things[operation].played + (uint64_t)((int64_t)(timer - things[operation].begin) / 1000);
}

// NCCL's strings are constants: they are kept.
static const char* kept(const char* text) { return strcmp(text, "-") == 0 ? NULL : strdup(text); }

// Whether events of this type mark calls of c10d.
static bool is_call(uint64_t type) { return is_v4 ? type == kGroup : type == kCollApi || type == kP2pApi; }

static void begin(unsigned long handle, unsigned long comm, struct event event, struct commwatch_nccl_thread* here) {
  const unsigned long call = is_v4 ? things[handle].parent : handle;
  const bool within = is_v4 ? event.type == kColl || event.type == kP2p : is_call(event.type);
  if (within && in_calls) here->call = call, here->launch_ns = now_ns();
  assert(profiler->start(comms[comm], &things[handle].handle, &event) == 0);
  if (within) here->call = 0;
}

static struct event event_of(uint64_t type, unsigned long parent, unsigned long in_group, unsigned channels, const char* const* texts, unsigned long count, int peer,
                             bool captured, uint64_t timer) {
  struct event event = {.type = type, .parent = things[parent].handle};
  void* const group_handle = things[in_group].handle;
  if (type == kCollApi) {
    event.coll_api.func = texts[0], event.coll_api.count = count, event.coll_api.datatype = texts[1], event.coll_api.captured = captured;
  } else if (type == kP2pApi) {
    event.p2p_api.func = texts[0], event.p2p_api.count = count, event.p2p_api.datatype = texts[1], event.p2p_api.captured = captured;
  } else if (type == kColl) {
    event.coll.func = texts[0], event.coll.count = count, event.coll.datatype = texts[1], event.coll.algo = texts[2], event.coll.proto = texts[3];
    event.coll.root = peer, event.coll.channels = (uint8_t)channels, event.coll.group = group_handle;
  } else if (type == kP2p) {
    event.p2p.func = texts[0], event.p2p.count = count, event.p2p.datatype = texts[1], event.p2p.peer = peer, event.p2p.channels = (uint8_t)channels;
    event.p2p.group = group_handle;
  } else if (type == kKernelCh) {
    event.kernel_ch.channel = (uint8_t)channels, event.kernel_ch.timer = played(parent, timer);
  }
  return event;
}

// The times of all calls, in their order; those of captured ones by replay.
static void times(unsigned long most, enum commwatch_nccl_state (*of)(uint64_t, struct commwatch_nccl_times*)) {
  for (unsigned long handle = 1; handle <= most; ++handle) {
    const uint64_t type = things[handle].type;
    if (!is_call(type)) continue;
    for (unsigned long replay = things[handle].captured;; ++replay) {
      struct commwatch_nccl_times found;
      const enum commwatch_nccl_state state = of(replay == 0 ? handle : commwatch_nccl_replay(handle, replay), &found);
      if (state == kCallOver) printf("call %lu %ld\n", handle, (long)(found.end_ns - found.begin_ns));
      if (replay == 0 || state == kCallUnknown) break;
    }
  }
}

int main(int count, char** args) {
  void* const plugin = count >= 3 ? dlopen(args[1], RTLD_NOW | RTLD_LOCAL) : NULL;
  if (plugin == NULL) return 2;
  in_calls = count == 4;
  profiler = dlsym(plugin, args[2]);
  is_v4 = strcmp(args[2], "ncclProfiler_v4") == 0;
  struct commwatch_nccl_thread* const here = ((struct commwatch_nccl_thread * (*)(void)) dlsym(plugin, "commwatch_nccl_here"))();
  ((void (*)(const struct commwatch_nccl_sink*))dlsym(plugin, "commwatch_nccl_sink_to"))(&sink);
  char line[512], texts[4][32];
  unsigned long handle, comm, type, parent, in_group, number, timer, most = 0;
  unsigned channels;
  int peer, captured, state, mask = 0;
  while (fgets(line, sizeof line, stdin) != NULL) {
    if (sscanf(line, "comm %lu %d %d", &comm, &peer, &state) == 3) {
      const int failed = is_v4 ? ((const struct profiler_v4*)(const void*)profiler)->init(&comms[comm], &mask, "", comm, 1, state, peer, log_nothing)
                               : profiler->init(&comms[comm], comm, &mask, "", 1, state, peer, log_nothing);
      assert(failed == 0);
    } else if (sscanf(line, "begin %lu %lu %lu %lu %lu %u %31s %lu %31s %31s %31s %d %d %lu", &handle, &comm, &type, &parent, &in_group, &channels, texts[0],
                      &number, texts[1], texts[2], texts[3], &peer, &captured, &timer) == 14) {
      const char* const all[] = {kept(texts[0]), kept(texts[1]), kept(texts[2]), kept(texts[3])};
      assert(handle < kMost);
      things[handle].type = type, things[handle].parent = parent, things[handle].captured = captured != 0;
      begin(handle, comm, event_of(type, parent, in_group, channels, all, number, peer, captured != 0, timer), here);
      most = handle;
    } else if (sscanf(line, "stop %lu", &handle) == 1) {
      if (things[handle].handle != NULL) assert(profiler->stop(things[handle].handle) == 0);
    } else if (sscanf(line, "state %lu %d %lu", &handle, &state, &timer) == 3) {
      union state_args state_args = {.kernel_ch = {played(things[handle].parent, timer)}};
      if (things[handle].handle != NULL) assert(profiler->state(things[handle].handle, state, &state_args) == 0);
    } else if (sscanf(line, "finalize %lu", &comm) == 1) {
      assert(profiler->finalize(comms[comm]) == 0);
    }
  }
  times(most, (enum commwatch_nccl_state(*)(uint64_t, struct commwatch_nccl_times*))dlsym(plugin, "commwatch_nccl_times_of"));
  return 0;
}
