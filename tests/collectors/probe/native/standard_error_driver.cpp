// Tests the lines of the native hook on standard error: each case in a process of its own, whose descriptor 2 is a pipe or a file.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <string>

#include "check.h"
#include "standard_error.h"

namespace {

using namespace commwatch;

constexpr char kLine[] = "commwatch: a line\n";

void say() { StandardError::write(kLine, sizeof kLine - 1); }

std::string content(int file) {
  char bytes[4096];
  const ssize_t size = pread(file, bytes, sizeof bytes, 0);
  return std::string(bytes, size > 0 ? static_cast<size_t>(size) : 0);
}

// Run a case in a child with this descriptor 2. What it returns is checked here, where failures can be reported.
template <class Case>
void in_child(int standard_error, const char* name, Case run) {
  const pid_t child = fork();
  if (child == 0) {
    dup2(standard_error, STDERR_FILENO);
    StandardError::is(OpenFile::of(STDERR_FILENO));
    _Exit(run() ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0, name);
}

struct Pipe {
  int ends[2];
  Pipe() { CHECK(pipe2(ends, O_CLOEXEC) == 0, "standard error: a pipe"); }
  ~Pipe() { close(ends[0]), close(ends[1]); }
};

// A file that takes the number 2, as C opens it (flags 0) or as Python does.
int reuse(int flags) {
  close(STDERR_FILENO);
  const int file = memfd_create("checkpoint", static_cast<unsigned>(flags));
  return file == STDERR_FILENO && ::write(file, "CHECKPOINT", 10) == 10 ? file : -1;
}

void test_writes() {
  const Pipe pipe;
  in_child(pipe.ends[1], "standard error: a line is written", [&] {
    say();
    char bytes[100];
    return read(pipe.ends[0], bytes, sizeof bytes) == sizeof kLine - 1 && std::string(bytes, sizeof kLine - 1) == kLine;
  });
  const int log = memfd_create("log", 0);
  in_child(log, "standard error: a second call does not change what it was", [&] {
    StandardError::is(OpenFile{});
    say();
    return content(log) == kLine;
  });
  in_child(log, "standard error: a line is written when no descriptor is left", [&] {
    const rlimit none{3, 3};
    if (ftruncate(log, 0) != 0 || lseek(log, 0, SEEK_SET) != 0 || setrlimit(RLIMIT_NOFILE, &none) != 0) return false;
    say();
    return content(log) == kLine;
  });
  close(log);
}

void test_another_file() {
  const Pipe pipe;
  const int log = memfd_create("log", 0);
  for (const int before : {pipe.ends[1], log}) {
    for (const unsigned flags : {0u, unsigned{MFD_CLOEXEC}}) {
      in_child(before, "standard error: nothing is written into a file that has its number", [&] {
        const int file = reuse(static_cast<int>(flags));
        say();
        return file >= 0 && content(file) == "CHECKPOINT";
      });
    }
  }
  in_child(log, "standard error: the same file, opened for appending, is another", [&] {
    fcntl(STDERR_FILENO, F_SETFL, O_APPEND);
    say();
    return content(log).empty();
  });
  in_child(log, "standard error: what exec would close was opened by the program", [&] {
    fcntl(STDERR_FILENO, F_SETFD, FD_CLOEXEC);
    say();
    return content(log).empty();
  });
  close(log);
}

void test_none() {
  for (const bool told : {false, true}) {
    const pid_t child = fork();
    if (child == 0) {
      close(STDERR_FILENO);
      if (told) StandardError::is(OpenFile{});
      say();
      const int file = reuse(0);
      say();
      _Exit(content(file) == "CHECKPOINT" ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0, "standard error: a process that had none has none");
  }
}

void test_takes_nothing() {
  Pipe full;
  in_child(full.ends[1], "standard error: a full pipe does not block", [&] {
    const char bytes[4096] = {};
    fcntl(full.ends[1], F_SETFL, O_NONBLOCK);
    while (::write(full.ends[1], bytes, sizeof bytes) > 0) {
    }
    fcntl(full.ends[1], F_SETFL, 0);
    say();
    return true;
  });
  Pipe unread;
  in_child(unread.ends[1], "standard error: a pipe without a reader does not end the process", [&] {
    signal(SIGPIPE, SIG_DFL);
    close(unread.ends[0]);
    say();
    return true;
  });
  const int log = memfd_create("log", 0);
  in_child(log, "standard error: a line beyond the limit of file sizes does not end the process", [&] {
    signal(SIGXFSZ, SIG_DFL);
    const rlimit most{sizeof kLine + 3, sizeof kLine + 3};
    setrlimit(RLIMIT_FSIZE, &most);
    for (int i = 0; i < 3; ++i) say();
    return content(log) == kLine;
  });
  close(log);
}

// Another thread puts a file in the place of standard error, and takes it away, while lines are written.
void test_swapped() {
  const int log = memfd_create("log", 0);
  in_child(log, "standard error: no line lands in a file that is there for a moment", [&] {
    const int kept = dup(STDERR_FILENO), file = memfd_create("checkpoint", 0);
    std::atomic<bool> over{false};
    in_threads(2, [&](int thread) {
      for (int i = 0; thread == 0 && i < 3000; ++i) dup2(i % 2 == 0 ? file : kept, STDERR_FILENO);
      if (thread == 0) over.store(true);
      while (thread == 1 && !over.load()) say();
    });
    return content(file).empty();
  });
  close(log);
}

}  // namespace

void test_standard_error() {
  test_writes();
  test_another_file();
  test_none();
  test_takes_nothing();
  test_swapped();
}
