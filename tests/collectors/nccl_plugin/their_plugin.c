// A profiler plugin as a user may have it: VERSION is that of its interface. It checks each handle and context that it gets, and counts.
// `theirs_report` prints the counts; with THEIRS_REPORT a process writes them at its end.
#define _GNU_SOURCE
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "interface.h"

#define MAGIC 0x7468656972732121

struct object {
  uint64_t magic, type;
  struct object* parent;
  atomic_int stops;
};

static atomic_int inits, starts[32], stops, states, finalizes, wrong, no_parent;
static _Atomic(int*) the_mask;

static int index_of(uint64_t type) {
  int index = 0;
  while (type > 1) type >>= 1, ++index;
  return index;
}

static void check(const void* handle) {
  if (handle == NULL || ((const struct object*)handle)->magic != MAGIC) atomic_fetch_add(&wrong, 1);
}

static int begin(void** context, int* mask) {
  *context = calloc(1, sizeof(struct object));
  ((struct object*)*context)->magic = MAGIC;
  __atomic_store_n(mask, kColl | kP2p | kProxyOp | kKernelCh, __ATOMIC_RELAXED);  // of all communicators
  the_mask = mask;
  atomic_fetch_add(&inits, 1);
  return 0;
}

#if VERSION == 4
static int init(void** context, int* mask, const char* name, uint64_t id, int nodes, int ranks, int rank, log_function log) {
#else
static int init(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, log_function log) {
#endif
  (void)id, (void)name, (void)nodes, (void)ranks, (void)rank, (void)log;
  return begin(context, mask);
}

static int start(void* context, void** handle, struct event* event) {
  check(context);
  const uint64_t type = VERSION == 4 ? event->type & 0xFF : event->type;
  struct object* const object = calloc(1, sizeof *object);
  *object = (struct object){.magic = MAGIC, .type = type, .parent = event->parent};
  const int has_parent = type != kGroup && type != kGroupApi && type != kCollApi;
  if (has_parent && event->parent == NULL) atomic_fetch_add(&no_parent, 1);
  if (has_parent && event->parent != NULL) check(event->parent);
  if (has_parent && VERSION == 4 && type == kColl && event->parent != NULL && object->parent->type != kGroup) atomic_fetch_add(&wrong, 1);
  if (type == kKernelCh && event->parent != NULL && !(object->parent->type & (kColl | kP2p))) atomic_fetch_add(&wrong, 1);
  atomic_fetch_add(&starts[index_of(type)], 1);
  *handle = object;
  return 0;
}

static int stop(void* handle) {
  check(handle);
  if (atomic_fetch_add(&((struct object*)handle)->stops, 1) != 0) atomic_fetch_add(&wrong, 1);
  atomic_fetch_add(&stops, 1);
  return 0;
}

static int state(void* handle, int state, union state_args* args) {
  check(handle);
  if (state == kKernelChStop && args->kernel_ch.timer == 0) atomic_fetch_add(&wrong, 1);
  atomic_fetch_add(&states, 1);
  return 0;
}

static int finalize(void* context) {
  check(context);
  atomic_fetch_add(&finalizes, 1);
  return 0;
}

#if VERSION == 4
const struct profiler_v4 ncclProfiler_v4 = {"theirs", init, start, stop, state, finalize};
#elif VERSION == 5
const struct profiler ncclProfiler_v5 = {"theirs", init, start, stop, state, finalize};
#else
const struct profiler ncclProfiler_v6 = {"theirs", init, start, stop, state, finalize};
#endif

static void report(FILE* to) {
  fprintf(to, "{\"inits\": %d, \"finalizes\": %d, \"stops\": %d, \"states\": %d, \"wrong\": %d, \"no_parent\": %d", inits, finalizes, stops, states, wrong,
          no_parent);
  for (int i = 0; i < 15; ++i) fprintf(to, ", \"%d\": %d", 1 << i, starts[i]);
  fprintf(to, "}\n");
}

void theirs_report(void) { report(stdout); }

// In a real job: a file of the process.
__attribute__((destructor)) static void at_exit(void) {
  const char* const path = getenv("THEIRS_REPORT");
  char name[512];
  if (path == NULL || inits == 0) return;
  snprintf(name, sizeof name, "%s-%d", path, (int)getpid());
  FILE* const file = fopen(name, "w");
  report(file);
  fclose(file);
}

// Ask for more types from now on.
void theirs_ask(int more) { __atomic_fetch_or(the_mask, more, __ATOMIC_RELAXED); }
