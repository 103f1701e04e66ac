// Plays NCCL: calls the plugin as NCCL does, from a script on standard input, or at random from many threads.
//
// Script, one command a line: see `run`. Names of handles are small numbers. GPU times are in ns.
#define _GNU_SOURCE
#include <assert.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "commwatch_nccl.h"
#include "interface.h"

static const struct profiler* profiler;
static bool is_v4;
static struct commwatch_nccl_thread* (*here)(void);
static enum commwatch_nccl_state (*the_times)(uint64_t, struct commwatch_nccl_times*);
static uint64_t (*the_lost)(void);
static atomic_int written, written_timed;
static bool quiet;

static int group(const struct commwatch_nccl_comm* comm) {
  if (!quiet) printf("group %lu %s %d/%d\n", (unsigned long)comm->id, comm->name, comm->rank, comm->ranks);
  return comm->id == 13 ? -1 : 7;
}

static void put(int group_id, const struct commwatch_nccl_op* op) {
  assert(group_id == 7);
  atomic_fetch_add(&written, 1);
  if (op->end_ns != 0) atomic_fetch_add(&written_timed, 1);
  assert(op->end_ns == 0 || (op->launch_ns <= op->begin_ns && op->begin_ns <= op->end_ns));
  if (!quiet && op->apart != 0) printf("channel %d last, %d us\n", (op->apart & 127) - 1, op->apart >> kApartAt);
  if (!quiet) {
    printf("op %s %lu %s peer %d choice %d ns %ld\n", op->func, (unsigned long)op->count, op->datatype, op->peer, op->choice,
           op->end_ns == 0 ? -1 : (long)(op->end_ns - op->begin_ns));
  }
}

static const struct commwatch_nccl_sink the_sink = {group, put};

// The plugin asks the library of NCCL's log function for the version: this program.
static int the_version = 22809;
int ncclGetVersion(int* version);
int ncclGetVersion(int* version) {
  *version = the_version;
  return 0;
}

static void log_nothing(int level, unsigned long flags, const char* file, int line, const char* format, ...) {
  (void)level, (void)flags, (void)file, (void)line, (void)format;
}

static uint64_t host_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

// The GPU's clock is this much behind the host's.
static const uint64_t kBehind = 5000000000u;
static uint64_t gpu_ns(void) { return host_ns() - kBehind; }

static int nccl_mask;

static void* comm_new(int id, const char* name) {
  void* context = NULL;
  const int failed = is_v4 ? ((const struct profiler_v4*)(const void*)profiler)->init(&context, &nccl_mask, name, (uint64_t)id, 1, 2, 0, log_nothing)
                           : profiler->init(&context, (uint64_t)id, &nccl_mask, name, 1, 2, 0, log_nothing);
  assert(failed == 0 && context != NULL);
  return context;
}

// What NCCL makes of an event in version 4, where an operation's parent is its group; of what is beyond, nothing may be read.
static struct event as_v4(struct event event) {
  struct event early = event;
  if (event.type == kColl) early.parent = event.coll.group;
  if (event.type == kP2p) early.parent = event.p2p.group, early.p2p.group = (void*)3;
  memset((char*)&early + 1, 0xFF, sizeof early.type - 1);
  memset(&early.coll.group, 0xFF, sizeof early - offsetof(struct event, coll.group));
  return early;
}

static void* begin(void* context, struct event event) {
  void* handle = (void*)1;
  if (is_v4 && event.type > kNetPlugin) return NULL;
  if (is_v4) event = as_v4(event);
  assert(profiler->start(context, &handle, &event) == 0);
  return handle;
}

static void* api(void* context, bool captured) {
  return begin(context, (struct event){.type = kCollApi, .coll_api = {"AllReduce", 8, "ncclFloat32", 0, NULL, captured}});
}

static void* coll(void* context, void* parent, int channels, void* in_group) {
  return begin(context, (struct event){.type = kColl,
                                       .parent = parent,
                                       .coll = {1, "AllReduce", NULL, NULL, 8, 0, "ncclFloat32", (uint8_t)channels, 4, "RING", "LL128", in_group}});
}

// 100 bytes, or 8 KiB for each of several channels.
static void* p2p(void* context, void* parent, int channels, void* in_group, int peer) {
  const size_t bytes = channels > 1 ? (size_t)channels * 8192 : 100;
  return begin(context, (struct event){.type = kP2p, .parent = parent, .p2p = {"Send", NULL, "ncclInt8", bytes, peer, (uint8_t)channels, in_group}});
}

static void* channel(void* context, void* parent, int number, uint64_t timer) {
  return begin(context, (struct event){.type = kKernelCh, .parent = parent, .kernel_ch = {(uint8_t)number, timer}});
}

static void channel_ends(void* handle, uint64_t timer) {
  union state_args args = {.kernel_ch = {timer}};
  if (handle == NULL) return;
  assert(profiler->state(handle, kKernelChStop, &args) == 0);
  assert(profiler->stop(handle) == 0);
}

static void stop(void* handle) {
  if (handle != NULL) assert(profiler->stop(handle) == 0);
}

// A call of c10d begins in this thread; 0: it ends.
static void set_call(uint64_t number) {
  here()->call = number;
  if (number != 0) here()->launch_ns = host_ns();
}

// Commands. Handles and contexts have numbers below 256.
static void run(void) {
  static void* things[256];
  char line[256], name[64];
  uint64_t zero = 0;  // the GPU's time at `clock`
  while (fgets(line, sizeof line, stdin) != NULL) {
    int a, b, c, d, e;
    long ns;
    if (sscanf(line, "comm %d %d %63s", &a, &b, name) == 3) {
      things[a] = comm_new(b, name);
    } else if (sscanf(line, "call %d", &a) == 1) {
      set_call((uint64_t)a);
    } else if (strncmp(line, "clock", 5) == 0) {
      zero = gpu_ns();
    } else if (sscanf(line, "api %d %d %d", &a, &b, &c) == 3) {
      things[a] = api(things[b], c != 0);
    } else if (sscanf(line, "group %d %d", &a, &b) == 2) {
      things[a] = begin(things[b], (struct event){.type = kGroup});
    } else if (sscanf(line, "coll %d %d %d %d", &a, &b, &c, &d) == 4) {
      things[a] = coll(things[b], c < 0 ? NULL : things[c], d, NULL);
    } else if (sscanf(line, "p2p %d %d %d %d", &a, &b, &c, &d) == 4) {
      things[a] = p2p(things[b], things[c], d, NULL, 3);
    } else if (sscanf(line, "tiny %d %d %d", &a, &b, &c) == 3) {
      things[a] = begin(things[b], (struct event){.type = kP2p, .parent = things[c], .p2p = {"Send", NULL, "ncclInt8", 100, 3, 2, NULL}});
    } else if (sscanf(line, "self %d %d %d %d", &a, &b, &c, &d) == 4) {
      things[a] = p2p(things[b], things[c], d, NULL, 0);
    } else if (sscanf(line, "broadcast %d", &a) == 1) {
      begin(things[a], (struct event){.type = kCollApi, .coll_api = {"Broadcast", 8, "ncclFloat32", 0, NULL, false}});
    } else if (sscanf(line, "version %d", &a) == 1) {
      the_version = a;
    } else if (sscanf(line, "in_group %d %d %d %d %d", &a, &b, &c, &d, &e) == 5) {
      things[a] = coll(things[b], things[c], d, things[e]);
    } else if (sscanf(line, "ask %d", &a) == 1) {
      ((void (*)(int))dlsym(dlopen(getenv("COMMWATCH_NCCL_CHAIN"), RTLD_NOW | RTLD_NOLOAD), "theirs_ask"))(a);
    } else if (sscanf(line, "proxy %d %d %d", &a, &b, &c) == 3) {
      // Of this process, or of another one: then the context and the parent are addresses of that process.
      void* handle = (void*)1;
      struct event event = {.type = kProxyOp, .parent = things[b], .proxy_op = {c != 0 ? (pid_t)c : getpid()}};
      assert(profiler->start(c != 0 ? (void*)8 : things[a], &handle, &event) == 0);
      printf("proxy %s\n", handle != NULL ? "has a handle" : "has none");
      stop(handle);
    } else if (sscanf(line, "channel %d %d %d %d %ld", &a, &b, &c, &d, &ns) == 5) {
      things[a] = channel(things[b], things[c], d, zero + (uint64_t)ns);
    } else if (sscanf(line, "ended %d %ld", &a, &ns) == 2) {
      channel_ends(things[a], zero + (uint64_t)ns);
    } else if (sscanf(line, "stop %d", &a) == 1) {
      stop(things[a]);
    } else if ((b = 0, sscanf(line, "times %d %d", &a, &b)) >= 1) {  // of a call, or of one of its replays
      struct commwatch_nccl_times times = {0, 0, 0, 0};
      const enum commwatch_nccl_state state = the_times(b != 0 ? commwatch_nccl_replay((uint64_t)a, (uint64_t)b) : (uint64_t)a, &times);
      const char* const names[] = {"unknown", "pending", "over"};
      if (state == kCallOver && times.apart != 0) printf("channel %d last, %d us\n", (times.apart & 127) - 1, times.apart >> kApartAt);
      printf("times %s %ld choice %d\n", names[state], state == kCallOver ? (long)(times.end_ns - times.begin_ns) : -1, times.choice);
    } else if (sscanf(line, "finalize %d", &a) == 1) {
      assert(profiler->finalize(things[a]) == 0);
    } else if (strncmp(line, "lost", 4) == 0) {
      printf("lost %lu\n", (unsigned long)the_lost());
    } else {
      fprintf(stderr, "what is %s", line);
      exit(2);
    }
  }
}

// -- many threads

static int operations_of_thread;
static atomic_int numbers = 1;
static atomic_int made_free, messages_free, made_in_call, untimed_in_call, over_in_call, not_recorded;

static void* wild(void* seed_) {
  unsigned seed = (unsigned)(uintptr_t)seed_;
  void* context = comm_new((int)seed + 1000, "wild");
  here()->launch_ns = host_ns();  // this thread makes calls of c10d
  for (int i = 0; i < operations_of_thread; ++i) {
    const bool in_call = rand_r(&seed) % 2 == 0, message = rand_r(&seed) % 4 == 0;
    const uint64_t number = (uint64_t)atomic_fetch_add(&numbers, 1);
    set_call(in_call ? number : 0);
    void* const called = api(context, false);
    const int channels = 1 + rand_r(&seed) % 5;
    void* const in_group = begin(context, (struct event){.type = kGroup});
    void* const op = message ? p2p(context, called, channels, in_group, 3) : coll(context, called, channels, in_group);
    stop(called);
    set_call(0);
    const bool untimed = in_call && (message || op == NULL);  // a handle of such a message is the chained plugin's
    atomic_fetch_add(untimed ? &untimed_in_call : op == NULL ? &not_recorded : in_call ? &made_in_call : &made_free, 1);
    if (message && !in_call && op != NULL) atomic_fetch_add(&messages_free, 1);
    const bool early = rand_r(&seed) % 2 == 0;
    if (early) stop(op);
    void* kernels[5] = {NULL};
    const uint64_t now = gpu_ns();
    for (int k = 0; k < channels; ++k) kernels[k] = channel(context, op, (k * 7) % 64, now + (uint64_t)k);
    for (int k = channels - 1; k >= 0; --k) channel_ends(kernels[k], now + 1000 + (uint64_t)k);
    if (!early) stop(op);
    const bool ours = !message && (in_call || !is_v4);  // other handles are the chained plugin's
    if (ours && rand_r(&seed) % 8 == 0) stop(kernels[0]);  // once more, when it is over
    stop(in_group);
    struct commwatch_nccl_times times;
    if (in_call && the_times(number, &times) == kCallOver) {
      assert(times.end_ns - times.begin_ns == 1000 + (uint64_t)channels - 1);
      atomic_fetch_add(&over_in_call, 1);
    }
    if (i % 1000 == 999) {
      assert(profiler->finalize(context) == 0);
      context = comm_new((int)seed, "again");
    }
  }
  assert(profiler->finalize(context) == 0);
  return NULL;
}

static void threads(int count) {
  quiet = true;
  pthread_t all[64];
  for (int i = 0; i < count; ++i) assert(pthread_create(&all[i], NULL, wild, (void*)(uintptr_t)(i + 1)) == 0);
  for (int i = 0; i < count; ++i) pthread_join(all[i], NULL);
  printf("{\"free\": %d, \"messages\": %d, \"written\": %d, \"timed\": %d, \"in_call\": %d, \"untimed_in_call\": %d, \"over\": %d, ", made_free, messages_free,
         written, written_timed, made_in_call, untimed_in_call, over_in_call);
  printf("\"not_recorded\": %d, \"lost\": %lu}\n", not_recorded, (unsigned long)the_lost());
}

int main(int count, char** args) {
  if (count < 3) return 2;
  void* const plugin = dlopen(args[1], RTLD_NOW | RTLD_LOCAL);
  if (plugin == NULL) {
    fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  profiler = dlsym(plugin, args[2]);
  is_v4 = strcmp(args[2], "ncclProfiler_v4") == 0;
  here = (struct commwatch_nccl_thread * (*)(void)) dlsym(plugin, "commwatch_nccl_here");
  the_times = (enum commwatch_nccl_state(*)(uint64_t, struct commwatch_nccl_times*))dlsym(plugin, "commwatch_nccl_times_of");
  the_lost = (uint64_t(*)(void))dlsym(plugin, "commwatch_nccl_lost");
  if (getenv("NO_SINK") == NULL) ((void (*)(const struct commwatch_nccl_sink*))dlsym(plugin, "commwatch_nccl_sink_to"))(&the_sink);
  if (count == 5) {
    operations_of_thread = atoi(args[4]);
    threads(atoi(args[3]));
  } else {
    run();
  }
  printf("mask %d\n", nccl_mask);
  const char* const theirs = getenv("COMMWATCH_NCCL_CHAIN");
  void* const library = theirs != NULL ? dlopen(theirs, RTLD_NOW | RTLD_NOLOAD) : NULL;
  if (library != NULL) ((void (*)(void))dlsym(library, "theirs_report"))();
  return 0;
}
