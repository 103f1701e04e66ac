// Lines on standard error, under the rules of collectors/commwatch/wire/descriptor.py: only while descriptor 2 is the open file that it was when the probe
// came. A program may close it, and the next file that it opens, perhaps a checkpoint, gets its number. Does not depend on torch.
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

namespace commwatch {

// Distinguishes an open file from another one that later gets its number; as `OpenFile` in Python.
struct OpenFile {
  uint64_t device = 0, inode = 0, kind = 0, flags = 0, born_ns = 0;

  bool operator==(const OpenFile& other) const {
    return device == other.device && inode == other.inode && kind == other.kind && flags == other.flags && born_ns == other.born_ns;
  }

  // All 0 if there is none.
  static OpenFile of(int number) {
    struct stat about;
    const int flags = fcntl(number, F_GETFL);
    if (flags < 0 || fstat(number, &about) != 0) return {};
    return {about.st_dev, about.st_ino, about.st_mode & S_IFMT, static_cast<uint64_t>(flags & (O_ACCMODE | O_APPEND)), born_ns_of(number)};
  }

 private:
  static uint64_t born_ns_of([[maybe_unused]] int number) {
#ifdef STATX_BTIME
    struct statx found;
    if (statx(number, "", AT_EMPTY_PATH | AT_STATX_DONT_SYNC, STATX_BTIME, &found) == 0 && (found.stx_mask & STATX_BTIME) != 0) {
      return static_cast<uint64_t>(found.stx_btime.tv_sec) * 1000000000u + found.stx_btime.tv_nsec;
    }
#endif
    return 0;
  }
};

class StandardError {
 public:
  // What it was when the probe came; all 0: there was none. The first call counts.
  static void is(const OpenFile& file) {
    static const OpenFile first = file;
    at_start().store(&first, std::memory_order_release);
  }

  // Write a line, in one write, or drop it. Neither blocks nor ends the process, which SIGPIPE or SIGXFSZ would do.
  static void write(const char* line, size_t length) {
    const OpenFile* const expected = at_start().load(std::memory_order_acquire);
    if (expected == nullptr || expected->kind == 0) return;
    // What came through exec is not closed by exec.
    const int of_descriptor = fcntl(STDERR_FILENO, F_GETFD);
    if (of_descriptor < 0 || (of_descriptor & FD_CLOEXEC) != 0 || !(OpenFile::of(STDERR_FILENO) == *expected)) return;
    // Another thread may close the number between check and write, but not the duplicate. If none is left, it hardly gets the number now.
    const int duplicate = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    if (duplicate < 0 && errno == EBADF) return;
    const int number = duplicate >= 0 ? duplicate : STDERR_FILENO;
    if (OpenFile::of(number) == *expected && accepts(number, length)) [[maybe_unused]] const ssize_t written = ::write(number, line, length);
    if (duplicate >= 0) close(duplicate);
  }

 private:
  static bool accepts(int number, size_t length) {
    pollfd ready{number, POLLOUT, 0};
    if (length > PIPE_BUF || poll(&ready, 1, 0) != 1 || ready.revents != POLLOUT) return false;
    rlimit most;
    struct stat about;
    if (getrlimit(RLIMIT_FSIZE, &most) != 0 || fstat(number, &about) != 0) return false;
    if (most.rlim_cur == RLIM_INFINITY || !S_ISREG(about.st_mode)) return true;
    return static_cast<uint64_t>(std::max<int64_t>(about.st_size, lseek(number, 0, SEEK_CUR))) + length <= most.rlim_cur;
  }

  static std::atomic<const OpenFile*>& at_start() {
    static std::atomic<const OpenFile*> file{nullptr};
    return file;
  }
};

}  // namespace commwatch
