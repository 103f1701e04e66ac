// Calls a profiler plugin as NCCL does for one collective after another, and prints the ns of one: ARGUMENTS: plugin, collectives, channels,
// 1 if they are made within calls of c10d. Counts calls of malloc.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "commwatch_nccl.h"
#include "interface.h"

extern void* __libc_malloc(size_t size);
static long mallocs;

void* malloc(size_t size) {
  ++mallocs;
  return __libc_malloc(size);
}

static uint64_t now_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int group(const struct commwatch_nccl_comm* comm) { return comm == NULL ? -1 : 0; }
static void put(int number, const struct commwatch_nccl_op* op) { (void)number, (void)op; }
static const struct commwatch_nccl_sink sink = {group, put};

static void log_nothing(int level, unsigned long flags, const char* file, int line, const char* format, ...) {
  (void)level, (void)flags, (void)file, (void)line, (void)format;
}

static const struct profiler* profiler;
static void* context;
static long dropped;  // collectives that the plugin did not take

static void collective(unsigned channels) {
  void *in_group = NULL, *api_group = NULL, *api = NULL, *coll = NULL, *kernels[64] = {NULL};
  profiler->start(context, &api_group, &(struct event){.type = kGroupApi});
  profiler->start(context, &api, &(struct event){.type = kCollApi, .parent = api_group, .coll_api = {"AllReduce", 1024, "ncclFloat32", 0, NULL, false}});
  if (api != NULL) profiler->stop(api);
  profiler->start(context, &in_group, &(struct event){.type = kGroup});
  profiler->start(context, &coll, &(struct event){.type = kColl, .parent = api, .coll = {1, "AllReduce", NULL, NULL, 1024, 0, "ncclFloat32",
                                                                                         (uint8_t)(channels != 0 ? channels : 1), 4, "RING", "SIMPLE", in_group}});
  if (coll == NULL) ++dropped;
  if (coll != NULL) profiler->stop(coll);
  if (in_group != NULL) profiler->stop(in_group);
  if (api_group != NULL) profiler->stop(api_group);
  const uint64_t gpu = now_ns(CLOCK_MONOTONIC) - 1000000;
  for (unsigned i = 0; i < channels; ++i) {
    profiler->start(context, &kernels[i], &(struct event){.type = kKernelCh, .parent = coll, .kernel_ch = {(uint8_t)i, gpu}});
  }
  for (unsigned i = 0; i < channels; ++i) {
    if (kernels[i] == NULL) continue;
    union state_args args = {.kernel_ch = {gpu + 1000}};
    profiler->state(kernels[i], kKernelChStop, &args);
    profiler->stop(kernels[i]);
  }
}

int main(int count, char** args) {
  if (count != 5) return 2;
  const int collectives = atoi(args[2]), channels = atoi(args[3]), in_calls = atoi(args[4]);
  void* const plugin = dlopen(args[1], RTLD_NOW | RTLD_LOCAL);
  if (plugin != NULL) profiler = dlsym(plugin, "ncclProfiler_v6");
  if (plugin != NULL && profiler == NULL) profiler = dlsym(plugin, "ncclProfiler_v5");
  if (profiler == NULL) {
    fprintf(stderr, "%s: no plugin of version 5 or 6: %s\n", args[1], plugin == NULL ? dlerror() : "no such symbol");
    return 1;
  }
  struct commwatch_nccl_thread* (*const here)(void) = (struct commwatch_nccl_thread * (*)(void)) dlsym(plugin, "commwatch_nccl_here");
  void (*const sink_to)(const struct commwatch_nccl_sink*) = (void (*)(const struct commwatch_nccl_sink*))dlsym(plugin, "commwatch_nccl_sink_to");
  if (sink_to != NULL) sink_to(&sink);
  int mask = 0;
  if (profiler->init(&context, 42, &mask, "bench", 1, 2, 0, log_nothing) != 0 || (mask & kKernelCh) == 0) {
    fprintf(stderr, "%s: asks NCCL for no kernels\n", args[1]);
    return 1;
  }
  uint64_t number = 0, began = 0;
  long before = 0;
  for (int i = -collectives / 10; i < collectives; ++i) {
    if (i == 0) before = mallocs, began = now_ns(CLOCK_THREAD_CPUTIME_ID);
    if (here != NULL) here()->call = in_calls ? ++number : 0;
    collective((unsigned)channels);
  }
  const uint64_t took = now_ns(CLOCK_THREAD_CPUTIME_ID) - began;
  printf("{\"ns\": %.1f, \"mallocs\": %.2f, \"dropped\": %ld}\n", (double)took / collectives, (double)(mallocs - before) / collectives, dropped);
  fflush(stdout);
  _Exit(0);
}
