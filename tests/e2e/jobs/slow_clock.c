// Preloaded: while the file that SLOW names exists, reading the CPU clock of a thread takes a millisecond of CPU. Little besides the
// probe reads it, so the job continues as before while the probe measures itself as slow.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int (*real)(clockid_t, struct timespec *);

static long long read_ns(clockid_t clock) {
  struct timespec now;
  real(clock, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  const char *file = getenv("SLOW");
  if (clock == CLOCK_THREAD_CPUTIME_ID && file != NULL && access(file, F_OK) == 0) {
    const long long until = read_ns(CLOCK_THREAD_CPUTIME_ID) + 1000000;
    while (read_ns(CLOCK_THREAD_CPUTIME_ID) < until) {
    }
  }
  return real(clock, now);
}
