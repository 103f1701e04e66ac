// The settings, and the clock of all times. README.md lists the variables.
//
// Read once, at the first use. `trace` prints what PLAYED_TRACE asks for.
#pragma once

#include <time.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace played {

using Ns = int64_t;  // CLOCK_MONOTONIC, as the records of commwatch
constexpr Ns kUnknown = -1;

inline Ns now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

struct Settings {
  int devices;
  Ns kernel_ns;
  std::vector<std::pair<std::string, Ns>> kernels;  // part of a kernel's name, and what such a kernel takes
  Ns copy_ns;
  double copy_gbps;
  Ns nccl_ns;
  double nccl_gbps;
  Ns nccl_apart_ns;
  bool data;       // collectives really move and add their data
  bool one_queue;  // what is put on a device begins in that order
  std::string shm;
  std::string lost;  // file whose existence means that the devices are lost
  std::string slow;  // file with the milliseconds that an event query takes
  int trace;         // 1: what is missing or odd, 2: every call, 3: addresses that are asked for
};
const Settings& settings();

bool is_lost();  // the devices; false without PLAYED_LOST
Ns query_ns();   // what an event query takes; 0 without PLAYED_SLOW

void trace(int level, const char* format, ...) __attribute__((format(printf, 2, 3)));
int thread_id();

}  // namespace played
