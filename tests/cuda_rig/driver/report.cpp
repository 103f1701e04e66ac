// Counts, and the report that is made of them: JSON, written at exit or on demand.
#include "report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace played {
namespace {

struct Books {
  std::mutex mutex;
  std::deque<Calls*> functions;
  std::unordered_map<int, std::string> threads;  // names, of threads that have ended too
  std::map<std::string, uint64_t> disturbed, missing, kernels;
  std::vector<NcclKernel> nccl;
  std::vector<std::pair<Ns, Ns>> computed;
};
Books& books() {
  static Books* all = new Books;  // never destroyed: others' destructors still call the driver
  return *all;
}

std::string thread_name(int thread) {
  char path[64], name[32] = "";
  snprintf(path, sizeof path, "/proc/self/task/%d/comm", thread);
  if (FILE* file = fopen(path, "re")) {
    if (fgets(name, sizeof name, file) == nullptr) name[0] = 0;
    fclose(file);
    name[strcspn(name, "\n")] = 0;
  }
  return name;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) >= 32) out += c;
  }
  return out + "\"";
}

std::string json_of(const std::map<std::string, uint64_t>& counts) {
  std::string out;
  for (const auto& [name, count] : counts) out += (out.empty() ? "" : ", ") + quoted(name) + ": " + std::to_string(count);
  return "{" + out + "}";
}

std::string json_of(const NcclKernel& k) {
  char line[512];
  snprintf(line, sizeof line,
           "{\"comm\": \"%016lx\", \"rank\": %d, \"ranks\": %d, \"device\": %d, \"first\": %lu, \"bytes\": %lu, "
           "\"queued\": %ld, \"begin\": %ld, \"end\": %ld, \"aborted\": %s, \"replayed\": %s, \"ops\": ",
           k.comm, k.rank, k.ranks, k.device, k.first, k.bytes, k.queued, k.begin, k.end, k.aborted ? "true" : "false",
           k.replayed ? "true" : "false");
  return line + quoted(k.ops) + ", \"kernel\": " + quoted(k.kernel) + "}";
}

void count(std::map<std::string, uint64_t>& counts, const std::string& what) {
  const std::lock_guard<std::mutex> guard(books().mutex);
  ++counts[what];
}

std::string report() {
  Books& all = books();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const char* rank = getenv("RANK");
  std::string out = "{\"pid\": " + std::to_string(getpid()) + ", \"rank\": " + (rank != nullptr ? rank : "null");
  const Totals& t = totals();
  const std::pair<const char*, int64_t> numbers[] = {
      {"events_plain", t.events_plain},     {"events_timed", t.events_timed},
      {"events_alive", t.events_alive},     {"captures", t.captures},
      {"captures_ended", t.captures_ended}, {"captures_disturbed", t.captures_disturbed},
      {"kernels", t.kernels},               {"graphs_launched", t.graphs_launched},
  };
  for (const auto& [name, value] : numbers) out += ",\n" + quoted(name) + ": " + std::to_string(value);
  out += ",\n\"disturbed\": " + json_of(all.disturbed) + ",\n\"missing\": " + json_of(all.missing);
  out += ",\n\"kernel_names\": " + json_of(all.kernels) + ",\n\"functions\": {";
  const char* comma = "\n  ";
  for (const Calls* calls : all.functions) {
    const std::string text = calls->json();
    if (text.empty()) continue;
    out += comma + quoted(calls->function) + ": " + text;
    comma = ",\n  ";
  }
  out += "},\n\"nccl\": [";
  comma = "\n  ";
  for (const NcclKernel& kernel : all.nccl) {
    out += comma + json_of(kernel);
    comma = ",\n  ";
  }
  out += "],\n\"computed\": [";
  comma = "";
  for (const auto& [begin, end] : all.computed) {
    out += comma + ("[" + std::to_string(begin) + ", " + std::to_string(end) + "]");
    comma = ", ";
  }
  return out + "]}\n";
}

}  // namespace

Calls& Calls::of(const char* function) {
  auto* calls = new Calls(function);
  const std::lock_guard<std::mutex> guard(books().mutex);
  books().functions.push_back(calls);
  return *calls;
}

std::atomic<uint64_t>& Calls::of_this_thread() {
  const int me = thread_id();
  for (ByThread& by : by_thread_) {
    int thread = 0;
    if (by.thread.load() != me && !by.thread.compare_exchange_strong(thread, me)) continue;
    const std::string name = thread_name(me);
    const std::lock_guard<std::mutex> guard(books().mutex);
    books().threads[me] = name;
    return by.calls;
  }
  return of_others_;
}

// With the books' lock. A name is that of now, for threads are named after their first calls.
std::string Calls::json() const {
  uint64_t calls = of_others_;
  for (const ByThread& by : by_thread_) calls += by.calls;
  if (calls == 0) return "";
  std::map<std::string, uint64_t> threads;
  for (const ByThread& by : by_thread_) {
    if (by.thread == 0) continue;
    std::string name = thread_name(by.thread);
    if (name.empty()) name = books().threads[by.thread];
    threads[name + "/" + std::to_string(by.thread)] += by.calls;
  }
  return "{\"calls\": " + std::to_string(calls) + ", \"threads\": " + json_of(threads) + "}";
}

Totals& totals() {
  static Totals* all = new Totals;
  return *all;
}

void note_disturbed(const char* function) {
  ++totals().captures_disturbed;
  trace(1, "a capture is broken by %s", function);
  count(books().disturbed, std::string(function) + " in " + thread_name(thread_id()));
}

void note_missing(const std::string& what) {
  trace(1, "not played: %s", what.c_str());
  count(books().missing, what);
}

void note_kernel(const std::string& name) {
  ++totals().kernels;
  count(books().kernels, name);
}

void note_computed(Ns begin, Ns end) {
  const std::lock_guard<std::mutex> guard(books().mutex);
  books().computed.emplace_back(begin, end);
}

void note_nccl(NcclKernel kernel) {
  const std::lock_guard<std::mutex> guard(books().mutex);
  books().nccl.push_back(std::move(kernel));
}

}  // namespace played

int played_report(const char* path) {
  const char* set = getenv("PLAYED_REPORT");
  std::string name = path != nullptr ? path : set != nullptr ? set : "";
  if (name.empty()) return -1;
  const char* rank = getenv("RANK");
  const std::pair<std::string, std::string> places[] = {{"%p", std::to_string(getpid())}, {"%r", rank != nullptr ? rank : "none"}};
  for (const auto& [place, value] : places) {
    for (size_t at; (at = name.find(place)) != std::string::npos;) name.replace(at, 2, value);
  }
  const std::string text = played::report(), partial = name + ".partial";
  FILE* file = fopen(partial.c_str(), "we");
  if (file == nullptr) return -1;
  const bool whole = fwrite(text.data(), 1, text.size(), file) == text.size();
  return fclose(file) == 0 && whole ? rename(partial.c_str(), name.c_str()) : -1;
}

// Only processes that used the driver write one.
__attribute__((destructor)) static void at_exit() {
  if (played::ready()) played_report(nullptr);
}
