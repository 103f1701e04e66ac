// Operations that no call of c10d has made: NCCL's, called by another library of this process, such as vLLM's. Our NCCL plugin reports them.
#pragma once

#include <strings.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "aside.h"
#include "commwatch_nccl.h"
#include "entered.h"
#include "groups.h"
#include "session.h"

namespace commwatch {

class Foreign {
 public:
  static const commwatch_nccl_sink* sink() {
    static const commwatch_nccl_sink functions{&group, &write};
    return &functions;
  }

 private:
  // A communicator, as a group of the session in which it was first used.
  struct Communicator {
    Session* session;
    std::unique_ptr<Group> group;
    std::atomic<uint32_t> next_seq{0};
  };
  static constexpr int kMost = 1024;
  static std::atomic<Communicator*>& place(int number) {
    static std::atomic<Communicator*> all[kMost] = {};  // never freed: NCCL may report until the process ends
    return all[number];
  }

  static int group(const commwatch_nccl_comm* comm) {
    try {
      const Entered entered;
      Session* const session = entered.get();
      static std::atomic<int> numbers{0};
      if (session == nullptr || session->off.load() || numbers.load() >= kMost) return -1;
      if (session->ring() == nullptr) {
        aside([&] { session->python.open(session, comm->rank, comm->ranks, -1); });
        if (session->ring() == nullptr) return -1;
      }
      char id[24];
      snprintf(id, sizeof id, "%016llx", static_cast<unsigned long long>(comm->id));
      const std::string name = std::string("nccl:") + (comm->name != nullptr && *comm->name != '\0' ? comm->name : id);
      auto made = std::make_unique<Communicator>();
      made->session = session;
      made->group = std::make_unique<Group>(nullptr, name);
      aside([&] { session->python.add_group(made->group.get(), nullptr, name.c_str(), "", comm->ranks); });
      const int number = numbers.fetch_add(1);
      if (number >= kMost) return -1;
      place(number).store(made.release());
      return number;
    } catch (const std::exception&) {  // no thread, or no memory: these operations are not recorded
      return -1;
    } catch (const PythonIsGone&) {
      return -1;
    }
  }

  static void write(int number, const commwatch_nccl_op* op) {
    const Entered entered;
    Session* const session = entered.get();
    Communicator* const comm = place(number).load();
    if (session == nullptr || session != comm->session || session->off.load(std::memory_order_relaxed)) return;
    Record record;
    record.op = code_of(op->func);
    if (record.op == 0) {
      session->ring()->add(format::kDropped, 1);
      return;
    }
    record.group = comm->group->small_id;
    record.size_bytes = op->count * commwatch_nccl_size(op->datatype) * (is_per_rank(op->func) ? static_cast<uint64_t>(comm->group->size) : 1);
    record.seq = comm->next_seq.fetch_add(1, std::memory_order_relaxed);
    record.launch_ns = op->launch_ns;
    record.flags = format::kOnDevice | format::kUnaligned;
    record.aux = op->choice;
    record.tag = op->apart;
    if (op->end_ns != 0) {
      record.start_ns = op->begin_ns;
      record.end_ns = op->end_ns;
      record.timing = format::kByNccl;
    } else {
      record.start_ns = record.end_ns = op->launch_ns;
      record.flags |= format::kUntimed;
    }
    session->exposure.not_known();
    session->ring()->write(record);
  }

  // The code of an operation by NCCL's name, such as AllReduce; 0 if there is none.
  static uint8_t code_of(const char* func) {
    if (strcmp(func, "AllGatherV") == 0) func = "Broadcast";  // NCCL fuses broadcasts so
    uint8_t code = 0;
    for (const char* ours : format::kOps) {
      ++code;
      const char* theirs = func;
      for (; *ours != '\0' && *theirs != '\0'; ++ours) {
        if (*ours == '_') continue;
        if (strncasecmp(ours, theirs, 1) != 0) break;
        ++theirs;
      }
      if (*ours == '\0' && *theirs == '\0') return code;
    }
    return 0;
  }

  // Whether NCCL counts the elements of one rank where nccl-tests counts those of all.
  static bool is_per_rank(const char* func) {
    return strcmp(func, "AllGather") == 0 || strcmp(func, "ReduceScatter") == 0 || strcasecmp(func, "AlltoAll") == 0 ||
           strcmp(func, "Gather") == 0 || strcmp(func, "Scatter") == 0;
  }
};

}  // namespace commwatch
