// Converts a GPU's clock to the host's.
//
// NCCL reports the GPU's times a little later, so each report bounds the distance of the two clocks from above: the smallest is the best. The
// clocks drift by some 20 µs a second, so only the last one to two seconds count.
#pragma once

#include <stdint.h>

#define WINDOW_NS INT64_C(1000000000)

struct gpu_clock {
  int64_t window;  // number of the current window by the GPU's clock; 0: there was no report
  int64_t least;   // the smallest distance in it, host minus GPU, in ns
  int64_t before;  // the same of the window before it
};

static inline void gpu_clock_report(struct gpu_clock* clock, int64_t gpu_ns, int64_t host_ns) {
  const int64_t window = gpu_ns / WINDOW_NS + 1, distance = host_ns - gpu_ns;
  // A report from the window before may come late.
  if (window != clock->window && window + 1 != clock->window) {
    clock->before = window == clock->window + 1 ? clock->least : distance;
    clock->window = window;
    clock->least = distance;
  }
  if (distance < clock->least) clock->least = distance;
}

// The host's time at a time of the GPU; there must have been a report.
static inline int64_t gpu_clock_host(const struct gpu_clock* clock, int64_t gpu_ns) {
  return gpu_ns + (clock->before < clock->least ? clock->before : clock->least);
}
