// A profiler plugin that writes NCCL's calls to a file of the process, SEQUENCE-<pid>, for player.c. VERSION is that of its interface.
//
// Lines: `comm NUMBER RANK RANKS`, `begin HANDLE COMM TYPE PARENT GROUP CHANNELS FUNC COUNT DATATYPE ALGO PROTO PEER CAPTURED TIMER`, `stop HANDLE`,
// `state HANDLE STATE TIMER`, `finalize COMM`. Handles are numbers; 0 is null. CHANNELS is the channel of a kernel.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "interface.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static FILE* file;
static unsigned long comms, handles;

static FILE* out(void) {
  char name[512];
  if (file == NULL) {
    snprintf(name, sizeof name, "%s-%d", getenv("SEQUENCE"), (int)getpid());
    file = fopen(name, "w");
  }
  return file;
}

static const char* text(const char* value) { return value != NULL && *value != '\0' ? value : "-"; }

static int begin(void** context, int* mask, int ranks, int rank) {
  __atomic_fetch_or(mask, kColl | kP2p | kKernelCh, __ATOMIC_RELAXED);
  pthread_mutex_lock(&lock);
  *context = (void*)++comms;
  fprintf(out(), "comm %lu %d %d\n", comms, rank, ranks);
  pthread_mutex_unlock(&lock);
  return 0;
}

static int start(void* context, void** handle, struct event* event) {
  const uint64_t type = VERSION == 4 ? *(const uint8_t*)event : event->type;
  const char *func = NULL, *datatype = NULL, *algo = NULL, *proto = NULL;
  unsigned long group = 0, channels = 0, count = 0, timer = 0;
  int peer = 0, captured = 0;
  if (type == kCollApi) {
    func = event->coll_api.func, count = event->coll_api.count, datatype = event->coll_api.datatype, captured = event->coll_api.captured;
  } else if (type == kP2pApi) {
    func = event->p2p_api.func, count = event->p2p_api.count, datatype = event->p2p_api.datatype, captured = event->p2p_api.captured;
  } else if (type == kColl) {
    func = event->coll.func, count = event->coll.count, datatype = event->coll.datatype, channels = event->coll.channels;
    algo = event->coll.algo, proto = event->coll.proto, peer = event->coll.root, group = VERSION == 4 ? 0 : (unsigned long)event->coll.group;
  } else if (type == kP2p) {
    func = event->p2p.func, count = event->p2p.count, datatype = event->p2p.datatype, channels = event->p2p.channels;
    peer = event->p2p.peer, group = VERSION == 4 ? 0 : (unsigned long)event->p2p.group;
  } else if (type == kKernelCh) {
    channels = event->kernel_ch.channel, timer = event->kernel_ch.timer;
  }
  pthread_mutex_lock(&lock);
  *handle = (void*)++handles;
  fprintf(out(), "begin %lu %lu %lu %lu %lu %lu %s %lu %s %s %s %d %d %lu\n", handles, (unsigned long)context, (unsigned long)type, (unsigned long)event->parent, group, channels, text(func), count, text(datatype), text(algo), text(proto), peer, captured, timer);
  pthread_mutex_unlock(&lock);
  return 0;
}

static int stop(void* handle) {
  pthread_mutex_lock(&lock);
  fprintf(out(), "stop %lu\n", (unsigned long)handle);
  pthread_mutex_unlock(&lock);
  return 0;
}

static int state(void* handle, int state, union state_args* args) {
  if (state != kKernelChStop) return 0;
  pthread_mutex_lock(&lock);
  fprintf(out(), "state %lu %d %lu\n", (unsigned long)handle, state, args->kernel_ch.timer);
  pthread_mutex_unlock(&lock);
  return 0;
}

static int finalize(void* context) {
  pthread_mutex_lock(&lock);
  fprintf(out(), "finalize %lu\n", (unsigned long)context);
  fflush(out());
  pthread_mutex_unlock(&lock);
  return 0;
}

#if VERSION == 4
static int init_v4(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks, int rank, log_function log) {
  (void)id, (void)name, (void)nodes, (void)log;
  return begin(context, mask, ranks, rank);
}
const struct profiler_v4 ncclProfiler_v4 = {"recorder", init_v4, start, stop, state, finalize};
#else
static int init(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, log_function log) {
  (void)id, (void)name, (void)nodes, (void)log;
  return begin(context, mask, ranks, rank);
}
#if VERSION == 5
const struct profiler ncclProfiler_v5 = {"recorder", init, start, stop, state, finalize};
#else
const struct profiler ncclProfiler_v6 = {"recorder", init, start, stop, state, finalize};
#endif
#endif
