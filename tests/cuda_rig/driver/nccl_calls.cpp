// What NCCL is asked for.
//
// The real NCCL decides what is launched, when and on which stream. When this library is preloaded, the functions below come before
// NCCL's own, note each call and pass it on: so a kernel's collectives are known when it is launched. Not preloaded, kernels of
// NCCL's take a fixed time and move nothing. Not noted: symmetric memory, ncclRedOpCreatePreMulSum, ncclCommGrow and -Shrink.
#include <dlfcn.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <unordered_map>

#include "nccl.h"
#include "nccl_api.h"
#include "report.h"

using namespace played;

namespace {

struct Known {
  uint64_t id = 0;
  std::shared_ptr<Communicator> meeting;  // once its first kernel is launched
  std::shared_ptr<Counters> counters;     // the same
  std::vector<NcclCall> calls;            // not yet in a kernel
  uint64_t splits = 0;
};
struct Comms {
  std::mutex mutex;
  std::unordered_map<ncclComm_t, Known> known;
  std::unordered_map<const void*, ncclComm_t> by_device;  // by the address that kernels are given
};
Comms& comms() {
  static Comms* all = new Comms;
  return *all;
}

uint64_t hash(const void* data, size_t size) {  // FNV-1a
  uint64_t hashed = 0xcbf29ce484222325;
  for (size_t i = 0; i < size; ++i) hashed = (hashed ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3;
  return hashed;
}

// NCCL's own function. PyTorch's NCCL is loaded behind this library, or was loaded for its group alone.
template <class F>
F* real(const char* name) {
  void* found = dlsym(RTLD_NEXT, name);
  if (found == nullptr) {
    if (void* const nccl = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_LAZY)) found = dlsym(nccl, name);
  }
  if (found == nullptr) {
    dprintf(STDERR_FILENO, "played: NCCL has no %s\n", name);
    abort();
  }
  return reinterpret_cast<F*>(found);
}

void made(ncclComm_t comm, uint64_t id) {
  if (comm == nullptr) return;
  const Guard guard(comms().mutex);
  comms().known[comm] = Known{id, nullptr, nullptr, {}, 0};
}

void gone(ncclComm_t comm, bool aborted) {
  Comms& all = comms();
  const Guard guard(all.mutex);
  const auto it = all.known.find(comm);
  if (it == all.known.end()) return;
  if (aborted && it->second.meeting) give_up(*it->second.meeting);
  for (auto by = all.by_device.begin(); by != all.by_device.end();) by = by->second == comm ? all.by_device.erase(by) : std::next(by);
  all.known.erase(it);
  wake();
}

// Note a call and pass it on, unless it comes from one of NCCL's functions, which has been noted.
template <class Real>
ncclResult_t pass_on(ncclComm_t comm, const NcclCall& call, Real real) {
  static thread_local int inside = 0;
  if (inside == 0 && call.count != 0) {
    const Guard guard(comms().mutex);
    const auto it = comms().known.find(comm);
    if (it != comms().known.end()) it->second.calls.push_back(call);
  }
  ++inside;
  const ncclResult_t result = real();
  --inside;
  return result;
}

// With the lock. The communicator that keeps this address somewhere in itself: ncclDevKernelArgs::comm. Null: there is none.
ncclComm_t find(const void* on_device) {
  Comms& all = comms();
  const auto by = all.by_device.find(on_device);
  if (by != all.by_device.end()) return by->second;
  for (const auto& [comm, known] : all.known) {
    const auto* const words = reinterpret_cast<const void* const*>(comm);
    const auto* const end = words + malloc_usable_size(comm) / sizeof *words;
    if (std::find(words, end, on_device) != end) return all.by_device[on_device] = comm;
  }
  return nullptr;
}

}  // namespace

namespace played {

MakeOpen nccl_work(const std::string& name, const void* args) {
  if (args == nullptr) return {};
  const Guard guard(comms().mutex);
  const ncclComm_t comm = find(*static_cast<const void* const*>(args));
  if (comm == nullptr) {
    trace(1, "a kernel of NCCL's whose communicator is not known: %s", name.c_str());
    return {};
  }
  Known& known = comms().known[comm];
  if (!known.meeting) {
    int rank = 0, ranks = 0;
    real<decltype(ncclCommUserRank)>("ncclCommUserRank")(comm, &rank);
    real<decltype(ncclCommCount)>("ncclCommCount")(comm, &ranks);
    known.meeting = meet(known.id, rank, ranks);
    known.counters = Counters::of(*static_cast<const void* const*>(args));
    if (!known.counters) trace(1, "no counters of NCCL's profiler: %s", name.c_str());
  }
  return nccl_kernel(name, known.meeting, std::exchange(known.calls, {}), known.counters, Counters::works(args));
}

}  // namespace played

// -- collectives and messages

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, int type, int op, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclAllReduce)>(__func__);
  return pass_on(comm, {Coll::kAllReduce, from, to, count, type, op, 0}, [&] { return theirs(from, to, count, type, op, comm, stream); });
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, int type, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclAllGather)>(__func__);
  return pass_on(comm, {Coll::kAllGather, from, to, count, type, 0, 0}, [&] { return theirs(from, to, count, type, comm, stream); });
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclReduceScatter)>(__func__);
  return pass_on(comm, {Coll::kReduceScatter, from, to, count, type, op, 0},
                 [&] { return theirs(from, to, count, type, op, comm, stream); });
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, int type, int root, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclBroadcast)>(__func__);
  return pass_on(comm, {Coll::kBroadcast, from, to, count, type, 0, root},
                 [&] { return theirs(from, to, count, type, root, comm, stream); });
}

ncclResult_t ncclBcast(void* to, size_t count, int type, int root, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclBcast)>(__func__);
  return pass_on(comm, {Coll::kBroadcast, to, to, count, type, 0, root}, [&] { return theirs(to, count, type, root, comm, stream); });
}

ncclResult_t ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclReduce)>(__func__);
  return pass_on(comm, {Coll::kReduce, from, to, count, type, op, root},
                 [&] { return theirs(from, to, count, type, op, root, comm, stream); });
}

ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, int type, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclAlltoAll)>(__func__);
  return pass_on(comm, {Coll::kAllToAll, from, to, count, type, 0, 0}, [&] { return theirs(from, to, count, type, comm, stream); });
}

ncclResult_t ncclGather(const void* from, void* to, size_t count, int type, int root, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclGather)>(__func__);
  return pass_on(comm, {Coll::kGather, from, to, count, type, 0, root}, [&] { return theirs(from, to, count, type, root, comm, stream); });
}

ncclResult_t ncclScatter(const void* from, void* to, size_t count, int type, int root, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclScatter)>(__func__);
  return pass_on(comm, {Coll::kScatter, from, to, count, type, 0, root}, [&] { return theirs(from, to, count, type, root, comm, stream); });
}

ncclResult_t ncclSend(const void* from, size_t count, int type, int peer, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclSend)>(__func__);
  return pass_on(comm, {Coll::kSend, from, nullptr, count, type, 0, peer}, [&] { return theirs(from, count, type, peer, comm, stream); });
}

ncclResult_t ncclRecv(void* to, size_t count, int type, int peer, ncclComm_t comm, CUstream stream) {
  static auto* const theirs = real<decltype(ncclRecv)>(__func__);
  return pass_on(comm, {Coll::kRecv, nullptr, to, count, type, 0, peer}, [&] { return theirs(to, count, type, peer, comm, stream); });
}

// -- communicators; all ranks of one compute the same id

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, void* config) {
  static auto* const theirs = real<decltype(ncclCommInitRankConfig)>(__func__);
  const ncclResult_t result = theirs(comm, ranks, id, rank, config);
  made(*comm, hash(&id, sizeof id));
  return result;
}

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  static auto* const theirs = real<decltype(ncclCommInitRank)>(__func__);
  const ncclResult_t result = theirs(comm, ranks, id, rank);
  made(*comm, hash(&id, sizeof id));
  return result;
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* comm, int ranks, int rank, int count, ncclUniqueId* ids, void* config) {
  static auto* const theirs = real<decltype(ncclCommInitRankScalable)>(__func__);
  const ncclResult_t result = theirs(comm, ranks, rank, count, ids, config);
  made(*comm, hash(ids, sizeof *ids * static_cast<size_t>(count)));
  return result;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, void* config) {
  static auto* const theirs = real<decltype(ncclCommSplit)>(__func__);
  uint64_t about[3] = {0, 0, static_cast<uint64_t>(color)};
  {
    const Guard guard(comms().mutex);
    Known& parent = comms().known[comm];
    about[0] = parent.id;
    about[1] = ++parent.splits;
  }
  const ncclResult_t result = theirs(comm, color, key, out, config);
  if (out != nullptr) made(*out, hash(about, sizeof about));
  return result;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  static auto* const theirs = real<decltype(ncclCommGetAsyncError)>(__func__);
  (void)counted(__func__, [] { return CUDA_SUCCESS; });
  return theirs(comm, error);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  static auto* const theirs = real<decltype(ncclCommDestroy)>(__func__);
  const ncclResult_t result = theirs(comm);
  gone(comm, false);
  return result;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  static auto* const theirs = real<decltype(ncclCommAbort)>(__func__);
  gone(comm, true);
  return theirs(comm);
}
