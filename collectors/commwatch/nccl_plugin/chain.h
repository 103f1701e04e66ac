// The user's own profiler plugin: NCCL loads only one, so ours passes all events on to it.
//
// It gets what NCCL would have given it: the same events, its own contexts, handles and activation mask. NCCL's mask is the union of both.
#pragma once

#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "interface.h"
#include "operations.h"

struct chain {
  int version;  // 0: there is no other plugin
  const struct profiler* plugin;
  const struct profiler_v4* plugin_v4;
  int (*start)(void* context, void** handle, struct event* event);
  int (*stop)(void* handle);
  int (*state)(void* handle, int state, union state_args* args);
  int (*finalize)(void* context);
};
static struct chain chain;

// Handles of the other plugin for our operations and their channels.
struct their_operation {
  uint64_t generation;
  void* handle;
};
static struct their_operation theirs_of_operation[OPERATIONS];
static void* theirs_of_channel[OPERATIONS][64];

static void* chain_open(const char* name) {
  if (strcasecmp(name, "STATIC_PLUGIN") == 0) return dlopen(0, RTLD_NOW | RTLD_LOCAL);
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  char longer[512];
  if (library == 0 && snprintf(longer, sizeof longer, "libnccl-profiler-%s.so", name) < (int)sizeof longer) {
    library = dlopen(longer, RTLD_NOW | RTLD_LOCAL);
  }
  return library;
}

// Load the other plugin, by the name that NCCL would have used. most: the version in which NCCL calls us. ours: a symbol of this library.
static void chain_load(const char* name, int most, const void* ours) {
  void* const library = chain_open(name);
  if (library == 0) return;
  for (int version = most; version >= kOldest; --version) {
    char symbol[32];
    snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", version);
    const void* const found = dlsym(library, symbol);
    Dl_info theirs, us;
    if (found == 0 || (dladdr(found, &theirs) != 0 && dladdr(ours, &us) != 0 && theirs.dli_fbase == us.dli_fbase)) continue;
    chain.version = version;
    if (version == 4) {
      chain.plugin_v4 = found;
      chain.start = chain.plugin_v4->start, chain.stop = chain.plugin_v4->stop;
      chain.state = chain.plugin_v4->state, chain.finalize = chain.plugin_v4->finalize;
    } else {
      chain.plugin = found;
      chain.start = chain.plugin->start, chain.stop = chain.plugin->stop;
      chain.state = chain.plugin->state, chain.finalize = chain.plugin->finalize;
    }
    return;
  }
}

static int chain_init(void** context, uint64_t id, int* mask, const char* name, int nodes, int ranks, int rank, log_function log) {
  if (chain.version == 4) return chain.plugin_v4->init(context, mask, name, id, nodes, ranks, rank, log);
  return chain.plugin->init(context, id, mask, name, nodes, ranks, rank, log);
}

// Whether NCCL gives events of this type to a plugin with this mask: it also gives the parents of what is asked for.
static bool chain_wants(uint64_t type, int mask) {
  const int leaves = kProxyOp | kProxyStep | kKernelCh | kNetPlugin, ce = kCeColl | kCeSync | kCeBatch;
  switch (type) {
    case kGroup: return mask & (kGroup | kColl | kP2p | leaves);
    case kColl: return mask & (kColl | leaves);
    case kP2p: return mask & (kP2p | leaves);
    case kProxyOp: return mask & (kProxyOp | kProxyStep | kNetPlugin);
    case kProxyStep: return mask & (kProxyStep | kNetPlugin);
    case kGroupApi: return mask & (kGroupApi | kP2pApi | kCollApi | kKernelLaunch | kGroup | kColl | kP2p | leaves | ce);
    case kCollApi: return mask & (kCollApi | kColl | leaves | ce);
    case kP2pApi: return mask & (kP2pApi | kP2p | leaves);
    case kCeColl: return mask & ce;
    default: return (uint64_t)mask & type;
  }
}

// Their handle in place of ours.
static void* chain_handle(void* handle) {
  if (!handle_is_ours(handle)) return handle;
  struct api_facts api;
  if (api_read(handle, &api)) return api.theirs;
  const struct group* const group = group_of(handle);
  if (group != 0) return atomic_load_explicit(&group->theirs, memory_order_acquire);
  if (handle_is(handle, kChannel)) return operation_of(handle) != 0 ? theirs_of_channel[handle_place(handle)][handle_channel(handle)] : 0;
  // Proxies may refer to an operation that is over for us.
  const struct their_operation* const theirs = &theirs_of_operation[handle_place(handle)];
  return handle_is(handle, kOperation) && theirs->generation == handle_generation(handle) ? theirs->handle : 0;
}

// Bytes of an event that may be read: the descriptor of version 5 ends with its largest member. Those of version 4 have been copied.
static size_t chain_size(int version) {
  return version == 5 ? offsetof(struct event, coll) + sizeof((struct event*)0)->coll : sizeof(struct event);
}

// Pass an event on; returns their handle. version: in which NCCL has called us.
static void* chain_start(void* context, const struct event* event, int version) {
  const uint64_t type = event->type;
  if (chain.version == 4 && type > kNetPlugin) return 0;
  struct event theirs;
  memset(&theirs, 0, sizeof theirs);
  memcpy(&theirs, event, chain_size(version));
  theirs.parent = chain_handle(theirs.parent);
  if (theirs.type == kColl) theirs.coll.group = chain_handle(theirs.coll.group);
  if (theirs.type == kP2p) theirs.p2p.group = chain_handle(theirs.p2p.group);
  // Before version 5 the group is the parent.
  if (chain.version == 4 && type == kColl) theirs.parent = theirs.coll.group;
  if (chain.version == 4 && type == kP2p) theirs.parent = theirs.p2p.group;
  void* handle = 0;
  chain.start(context, &handle, &theirs);
  return handle;
}
