// Settings out of the environment. The files of PLAYED_LOST and PLAYED_SLOW are read at each call, so that a test can change its mind.
#include "settings.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace played {
namespace {

std::string text_of(const char* name, const char* otherwise = "") {
  const char* value = getenv(name);
  return value != nullptr ? value : otherwise;
}

double number_of(const char* name, double otherwise) {
  const std::string text = text_of(name);
  return text.empty() ? otherwise : atof(text.c_str());
}

Ns us_of(const char* name, double otherwise) { return static_cast<Ns>(1e3 * number_of(name, otherwise)); }

// part:us,part:us
std::vector<std::pair<std::string, Ns>> kernels_of(std::string rest) {
  std::vector<std::pair<std::string, Ns>> found;
  while (!rest.empty()) {
    const size_t comma = rest.find(','), colon = rest.find(':');
    if (colon == std::string::npos) break;
    found.emplace_back(rest.substr(0, colon), static_cast<Ns>(1e3 * atof(rest.c_str() + colon + 1)));
    rest = comma == std::string::npos ? "" : rest.substr(comma + 1);
  }
  return found;
}

Settings* read() {
  auto* s = new Settings;  // never destroyed: the runtime still asks at exit
  s->devices = static_cast<int>(number_of("PLAYED_DEVICES", 2));
  s->kernel_ns = us_of("PLAYED_KERNEL_US", 5);
  s->kernels = kernels_of(text_of("PLAYED_KERNELS"));
  s->copy_ns = us_of("PLAYED_COPY_US", 2);
  s->copy_gbps = number_of("PLAYED_COPY_GBPS", 50);
  s->nccl_ns = us_of("PLAYED_NCCL_US", 200);
  s->nccl_gbps = number_of("PLAYED_NCCL_GBPS", 100);
  s->nccl_apart_ns = us_of("PLAYED_NCCL_APART_US", 0);
  s->data = number_of("PLAYED_DATA", 1) != 0;
  s->one_queue = number_of("CUDA_DEVICE_MAX_CONNECTIONS", 8) == 1;
  s->shm = text_of("PLAYED_SHM", "/dev/shm");
  s->lost = text_of("PLAYED_LOST");
  s->slow = text_of("PLAYED_SLOW");
  s->trace = static_cast<int>(number_of("PLAYED_TRACE", 0));
  return s;
}

}  // namespace

const Settings& settings() {
  static const Settings* const all = read();
  return *all;
}

bool is_lost() { return !settings().lost.empty() && access(settings().lost.c_str(), F_OK) == 0; }

Ns query_ns() {
  if (settings().slow.empty()) return 0;
  FILE* file = fopen(settings().slow.c_str(), "re");
  if (file == nullptr) return 0;
  double ms = 0;
  if (fscanf(file, "%lf", &ms) != 1) ms = 0;
  fclose(file);
  return static_cast<Ns>(1e6 * ms);
}

void trace(int level, const char* format, ...) {
  if (settings().trace < level) return;
  char line[512];
  va_list args;
  va_start(args, format);
  vsnprintf(line, sizeof line, format, args);
  va_end(args);
  dprintf(STDERR_FILENO, "played[%d.%d]: %s\n", getpid(), thread_id(), line);
}

int thread_id() {
  static thread_local const int id = static_cast<int>(syscall(SYS_gettid));
  return id;
}

}  // namespace played
