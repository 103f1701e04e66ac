// The times of the operations that one call of c10d has made, until the probe asks for them.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "commwatch_nccl.h"

// A call has a place in this table, by its number; a later call takes it over.
#define CALLS 8192

struct call {
  atomic_flag taken;  // for a few instructions; a thread that finds it set skips the call
  uint64_t number;
  uint32_t begun, ended;
  bool untimed;
  uint64_t begin_ns, end_ns;
  uint64_t running_ns;  // since when an operation of it is known to run; 0: not known
  uint16_t choice;
  int32_t apart;
};

static struct call calls[CALLS];

// Calls of one graph have numbers one after another, and so have its replays.
static inline uint64_t call_place(uint64_t number) { return (number + (number >> 40) * 509) % CALLS; }

// Takes the place of a call; null if another thread has it at this moment.
static inline struct call* call_take(uint64_t number) {
  struct call* const call = &calls[call_place(number)];
  for (int tries = 0; tries < 64; ++tries) {
    if (!atomic_flag_test_and_set_explicit(&call->taken, memory_order_acquire)) return call;
  }
  return 0;
}

static inline void call_give_back(struct call* call) { atomic_flag_clear_explicit(&call->taken, memory_order_release); }

// An operation of this call begins. Returns whether it is counted there: then it must end there.
static inline bool call_begins(uint64_t number, uint16_t choice) {
  struct call* const call = call_take(number);
  if (call == 0) return false;
  if (call->number != number) {
    call->number = number;
    call->begun = call->ended = 0;
    call->untimed = false;
    call->begin_ns = UINT64_MAX;
    call->end_ns = call->running_ns = 0;
    call->choice = choice;
  }
  if (call->choice != choice) call->choice = 0;
  ++call->begun;
  call_give_back(call);
  return true;
}

// The GPU runs an operation of this call.
static inline void call_runs(uint64_t number, uint64_t since_ns) {
  struct call* const call = call_take(number);
  if (call == 0) return;
  if (call->number == number && call->running_ns == 0) call->running_ns = since_ns;
  call_give_back(call);
}

// It has ended; end_ns 0: its times are not known. flags: kShared and kUncertain, or 0.
static inline void call_ends(uint64_t number, uint64_t begin_ns, uint64_t end_ns, uint16_t flags, int32_t apart) {
  struct call* call = 0;
  while (call == 0) call = call_take(number);  // the other thread needs a few instructions
  if (call->number == number) {
    ++call->ended;
    if (end_ns == 0) call->untimed = true;
    call->choice |= flags;
    call->apart = call->ended == 1 ? apart : 0;
    if (begin_ns < call->begin_ns) call->begin_ns = begin_ns;
    if (end_ns > call->end_ns) call->end_ns = end_ns;
  }
  call_give_back(call);
}

static inline enum commwatch_nccl_state call_times(uint64_t number, struct commwatch_nccl_times* times) {
  struct call* const call = call_take(number);
  if (call == 0) return kCallPending;
  enum commwatch_nccl_state state = kCallUnknown;
  if (call->number == number && !call->untimed) {
    state = call->ended < call->begun ? kCallPending : kCallOver;
    times->begin_ns = state == kCallPending ? call->running_ns : call->begin_ns;
    times->end_ns = call->end_ns;
    times->choice = call->choice;
    times->apart = call->apart;
  }
  call_give_back(call);
  return state;
}
