// The hook: a boxed kernel for every operator of the namespace c10d, at BackendSelect, which every call passes exactly once.
//
// It takes no lock and never the GIL. For the first operation of the process, of a group and of a dtype, another thread
// calls Python for a number (aside.h). Exceptions of our bookkeeping are caught; the user's call is outside of that: it runs
// once, and its exceptions pass through. Called through ctypes; see library.py.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <cxxabi.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>
#include <torch/version.h>

#include <system_error>

#include "aside.h"
#include "backends.h"
#include "checked.h"
#include "cuda_waits.h"
#include "device.h"
#include "ending.h"
#include "entered.h"
#include "flight.h"
#include "foreign.h"
#include "nccl_plugin.h"
#include "replays.h"
#include "sizes.h"
#include "spare.h"
#include "splits.h"

namespace commwatch {
namespace {

using torch::jit::Stack;

// One operator, as torch_ops.py describes it. The `_at` fields are argument positions; -1: there is no such argument.
struct Op {
  std::string name;
  int code;  // 0: not in the table of operations, Python assigns one
  bool p2p;
  format::Measure measure;
  int arguments;
  int group_at;
  int async_at;
  int peer_at;
  int tag_at;
};

// -- batches

// Operations between `_start_coalescing` and `_end_coalescing` of a process group. Their Works never complete; only the
// Work that `_end_coalescing` returns does. All of this happens in one thread, so the batches are thread-local.
struct Batch {
  const c10d::ProcessGroup* group;
  Flights flights;
  std::optional<OnDevice> last;
};

std::vector<Batch>& batches() {
  static thread_local std::vector<Batch> open;
  return open;
}

Batch* batch_of(const c10d::ProcessGroup* group) {
  for (Batch& batch : batches()) {
    if (batch.group == group) return &batch;
  }
  return nullptr;
}

// Remove this group's batch from the open ones, and return it.
std::optional<Batch> take_batch(const c10d::ProcessGroup* group) {
  Batch* const found = batch_of(group);
  if (found == nullptr) return std::nullopt;
  std::optional<Batch> batch = std::move(*found);
  batches().erase(batches().begin() + (found - batches().data()));
  InOperation::batches(batches().size());
  return batch;
}

void follow_on_device(Session& session, OnDevice&& noted, const c10d::ProcessGroup* group, c10::intrusive_ptr<c10d::Work> work,
                      std::shared_ptr<Flight> flight) {
  if (noted.timing == DeviceTiming::kOff) return flight->finish(now_ns(), format::kByNone, format::kUntimed);
  Batch* const batch = batch_of(group);
  if (batch == nullptr) {
    Flights alone;
    alone.push_back(std::move(flight));
    return look_after(session, std::move(noted), std::move(work), std::move(alone));
  }
  noted.first |= batch->last && batch->last->first;
  batch->last.emplace(std::move(noted));
  batch->flights.push_back(std::move(flight));
}

// -- one operation

c10d::ProcessGroup& process_group_of(const IValue& argument) {
  // Like toCustomClass, without the type check, which the operator's schema has done.
  return static_cast<c10d::ProcessGroup&>(*argument.toObjectRef().getSlot(0).toCapsule());
}

// The Work that an operation returned; absent if it returned something else. IValue::isCustomClass would look for the class by its name.
std::optional<c10::intrusive_ptr<c10d::Work>> work_of(const IValue& result) {
  static const c10::ClassType* const type = c10::getCustomClassType<c10::intrusive_ptr<c10d::Work>>().get();
  if (!result.isObject() || result.toObjectRef().type().get() != type) return std::nullopt;
  return c10::static_intrusive_pointer_cast<c10d::Work>(result.toObjectRef().getSlot(0).toCapsule());
}

const std::string& name_of(const c10d::ProcessGroup& process_group) {
  static const std::string* const none = new std::string;
  try {
    return process_group.getGroupName();
  } catch (const std::exception&) {  // a group not created by torch.distributed may have none
    return *none;
  }
}

// Null if there is no room for another.
Group* group_of(Session& session, const c10d::ProcessGroup& process_group) {
  const std::string& name = name_of(process_group);
  if (Group* known = session.find(&process_group, name)) return known;
  if (!session.has_room()) return nullptr;
  auto group = std::make_unique<Group>(&process_group, name);
  aside([&] {
    session.python.add_group(group.get(), group->address, name.c_str(), process_group.getGroupDesc().c_str(), process_group.getSize());
  });
  return session.add(std::move(group));
}

uint8_t dtype_of(Session& session, c10::ScalarType type) {
  std::atomic<uint8_t>& code = session.dtypes[static_cast<int>(type)];
  if (code.load() == 0) {
    const std::string name(c10::getDtypeNames(type).first);
    aside([&] { code.store(static_cast<uint8_t>(session.python.add_dtype(name.c_str()))); });
  }
  return code.load();
}

struct Launched {
  std::shared_ptr<Flight> flight;
  std::optional<OnDevice> noted;  // absent on the CPU
  std::optional<Check> check;
  const c10d::ProcessGroup* group = nullptr;
  uint32_t cost_of = 0;
};

struct Kernel : c10::OperatorKernel {
  explicit Kernel(Op o) : op(std::move(o)) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
    const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);
    const Entered entered;
    Session* const session = entered.get();
    const NcclPlugin::Call nccl_call;  // also if it is not recorded: else it would count as one that only NCCL knows
    Launched launched;
    if (session != nullptr && !session->off.load(std::memory_order_relaxed)) {
      try {
        SpareMemory<Flight>::fetch();
        Events::fetch();
        launch(*session, *stack, nccl_call, &launched);
      } catch (const abi::__forced_unwind&) {  // Python ends this thread because the interpreter is shutting down
        throw;
      } catch (const PythonIsGone&) {
        session->off.store(true);
      } catch (const std::exception& error) {
        session->fault(op.name.c_str(), error.what());
      } catch (...) {
        session->fault(op.name.c_str(), "unknown exception");
      }
    }
    const InOperation in_operation;
    if (!launched.flight) return handle.redispatchBoxed(below, stack);
    if (launched.noted) fetch_watch();
    try {
      handle.redispatchBoxed(below, stack);
    } catch (...) {
      launched.flight->finish(now_ns(), format::kByCall, format::kFailed);
      throw;
    }
    try {
      follow(*session, launched, *stack);
    } catch (const std::exception& error) {
      session->fault(op.name.c_str(), error.what());
    } catch (...) {
      session->fault(op.name.c_str(), "unknown exception");
    }
  }

  // Describes the operation in `launched`, in place, as its parts are large to move. It has no flight if the operation is not recorded.
  void launch(Session& session, const Stack& stack, const NcclPlugin::Call& nccl_call, Launched* launched) {
    const IValue* args = &stack[stack.size() - op.arguments];
    if (has_no_data(args, op.arguments)) return;
    c10d::ProcessGroup& process_group = process_group_of(args[op.group_at]);
    if (session.ring() == nullptr && !open(session, process_group, args)) return;
    const uint32_t cost_of = Cost::due();
    const Cost cost(session, cost_of);
    const uint64_t now = now_ns();
    nccl_call.begins(now);
    Group* const group = group_of(session, process_group);
    if (group == nullptr) {
      session.ring()->add(format::kDropped, 1);
      return;
    }
    Record record;
    record.launch_ns = now;
    record.group = group->small_id;
    record.flags = group->aligned ? 0 : format::kUnaligned;
    launched->group = &process_group;
    launched->cost_of = cost_of;
    const std::optional<at::Device> device = measure(session, args, *group, &record);
    if (op.async_at >= 0 && args[op.async_at].toBool()) record.flags |= format::kAsync;
    if (op.peer_at >= 0) record.peer = group->global_rank(args[op.peer_at].toInt());
    record.op = static_cast<uint8_t>(op.code != 0 ? op.code : added_code(session));
    if (op.p2p && op.tag_at >= 0) record.tag = static_cast<int32_t>(args[op.tag_at].toInt());
    if (device && session.graphs.capturing() && is_capturing(*device) &&
        session.graphs.add(Captured{group->address, group->name, op.p2p, record, nccl_call.number()})) {
      return;  // it runs at each replay
    }
    Queue& queue = numbered(*group, op.p2p, &record);
    const bool first = device && queue.first_on(device->index(), op.p2p && batch_of(&process_group) != nullptr);
    if (!records(session, *group, queue, op.p2p, record)) return;
    if (op.code == format::kAllToAll) note_splits(*session.ring(), record, args, op.group_at, group->size);
    auto flight = std::allocate_shared<Flight>(SpareMemory<Flight>(), session, queue, op.p2p, !device.has_value(), cost_of, record);
    flight->within(nccl_call.number());
    if (is_beside(session, record)) flight->is_beside();
    if (!device) launched->check = check_of(session, *group, record, args, process_group);
    if (device) {
      refuse_devices(session, op.name.c_str());
      have_times(*group, process_group, *device);
      CudaWaits::watch(session, *device);
      // One stream for each device of a group, and one for each peer.
      const uint64_t line = line_of(&process_group, (op.p2p ? record.peer + 1 : 0) * int64_t{256} + device->index());
      const bool has_work = op.p2p || (record.flags & format::kAsync) != 0;
      const OwnTimes own_times = own_times_of(*group, has_work, batch_of(&process_group) != nullptr);
      OnDevice& noted = launched->noted.emplace(launch_on(*device, timing_of(*group, own_times), own_times, line, first));
      noted.group = group;
      if (!has_work && CudaWaits::computes_here(session, *device)) noted.waits = &session.waits;
      noted.here = !has_work && group->blocks_here.load();
      if (has_work) add_outputs(args[0], &noted.outputs);
    }
    launched->flight = std::move(flight);  // last: what throws above leaves the operation unrecorded
  }

  // Whether an operation blocks a thread that does not train. One that runs a backward pass does.
  bool is_beside(Session& session, const Record& record) const {
    const bool elsewhere = session.training.is_elsewhere((record.flags & format::kOnDevice) != 0);
    return elsewhere && !op.p2p && (record.flags & format::kAsync) == 0 && torch::autograd::get_current_graph_task_id() < 0;
  }

  // The number of an operator that is not in the table, in the ring of this session.
  int added_code(Session& session) const {
    std::atomic<int>& code = session.op_codes[this];
    if (code.load() == 0) aside([&] { code.store(session.python.add_op(op.name.c_str())); });
    return code.load();
  }

  // Returns true once the ring exists. Otherwise the session is off: Python has printed why, or another thread has closed it.
  bool open(Session& session, const c10d::ProcessGroup& process_group, const IValue* args) const {
    const Size size = measured(op.measure, args, 1);
    // The thread that calls Python does not have the trainer's current device.
    const int gpu = size.first != nullptr && size.first->is_cuda() ? size.first->device().index() : -1;
    bool made = false;
    try {
      aside([&] { made = session.python.open(&session, process_group.getRank(), process_group.getSize(), gpu) != 0; });
    } catch (const std::system_error& error) {  // the process cannot create another thread
      if (!session.off.load()) Session::say("not recording this run", op.name.c_str(), error.what());
    }
    if (made && session.ring() != nullptr) return true;
    session.off.store(true);
    return false;
  }

  // Records size and dtype; returns the device, none for the CPU.
  std::optional<at::Device> measure(Session& session, const IValue* args, const Group& group, Record* record) const {
    const Size size = measured(op.measure, args, group.size);
    if (size.known) {
      record->size_bytes = size.bytes;
    } else {
      record->flags |= format::kNoSize;
    }
    if (size.first == nullptr) return std::nullopt;
    if (op.measure != format::Measure::kNone) record->dtype = dtype_of(session, size.first->scalar_type());
    if (size.first->is_cpu()) return std::nullopt;
    record->flags |= format::kOnDevice;
    session.exposure.not_known();
    return size.first->device();
  }

  static void follow(Session& session, Launched& launched, Stack& stack) {
    const Cost cost(session, launched.cost_of);
    Flight& flight = *launched.flight;
    if (stack.empty() || stack.back().isNone()) return flight.finish(now_ns(), format::kByCall);
    auto work = work_of(stack.back());
    if (!work) {
      flight.finish(now_ns(), format::kByNone, format::kUntimed);
    } else if (launched.noted) {
      follow_on_device(session, std::move(*launched.noted), launched.group, *std::move(work), std::move(launched.flight));
    } else if (*work) {
      const std::shared_ptr<Flight> checked = launched.check ? launched.flight : nullptr;
      std::shared_ptr<Flight> awaited = flight.sees_waits() ? launched.flight : nullptr;
      const bool has_future = follow_on_cpu(session, stack.back(), *std::move(work), std::move(launched.flight));
      if (checked) check_end(stack.back(), std::move(*launched.check), checked);
      if (awaited && has_future && !awaited->done()) see_waits(stack.back(), std::move(awaited));
    } else {
      flight.finish(now_ns(), format::kByCall);
    }
  }

  const Op op;
};

// A batch of this group begins in this thread. Drops an earlier one that never ended because the user's code raised.
void batch_begins(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  take_batch(group.get());
  batches().push_back(Batch{group.get(), {}, std::nullopt});
  InOperation::batches(batches().size());
}

// The batch ends when `work` ends; without a Work, when the current stream has reached this point.
void batch_ends(const std::optional<c10::intrusive_ptr<c10d::Work>>& work, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const Entered entered;
  std::optional<Batch> batch = take_batch(group.get());
  // An earlier session may have begun it; this one has no poller before its ring.
  if (entered.get() == nullptr || entered.get()->ring() == nullptr || !batch || !batch->last) return;
  batch->last->line = line_of(group.get(), -1);
  batch->last->outputs.clear();  // the Work of a batch holds none
  look_after(*entered.get(), std::move(*batch->last), work.value_or(nullptr), std::move(batch->flights));
}

// Leaked: backend threads may still use it when the process ends.
torch::Library *library = nullptr, *batch_library = nullptr;

void hook_batches() {
  batch_library = new torch::Library(torch::Library::FRAGMENT, "commwatch", std::nullopt, __FILE__, __LINE__);
  const std::string group = "__torch__.torch.classes.c10d.ProcessGroup group", work = "__torch__.torch.classes.c10d.Work? work";
  batch_library->def(("batch_begins(" + group + ") -> ()").c_str(), &batch_begins);
  batch_library->def(("batch_ends(" + work + ", " + group + ") -> ()").c_str(), &batch_ends);
}

}  // namespace
}  // namespace commwatch

// -- functions that Python calls

using namespace commwatch;

#define COMMWATCH_API extern "C" __attribute__((visibility("default")))

// Identifies the sources and the torch that the library was built with; Python compares it with the expected value.
COMMWATCH_API const char* cw_key() { return COMMWATCH_KEY; }

// Describe one operator, before cw_install; once per process.
COMMWATCH_API int cw_hook(const char* name, const char* op_name, int code, int p2p, int measure, int arguments, int group_at, int async_at,
                          int peer_at, int tag_at) {
  try {
    if (library == nullptr) {
      library = new torch::Library(torch::Library::IMPL, "c10d", std::make_optional(c10::DispatchKey::BackendSelect), __FILE__, __LINE__);
      hook_batches();
    }
    Op op{op_name, code, p2p != 0, static_cast<format::Measure>(measure), arguments, group_at, async_at, peer_at, tag_at};
    library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(std::move(op))));
    return 1;
  } catch (...) {
    return 0;
  }
}

// Remove the kernels from the dispatcher. Only while no other thread communicates: the dispatcher does not protect its table
// from concurrent dispatch. So cw_uninstall leaves them registered; without a session they forward every call.
COMMWATCH_API void cw_unhook() {
  CudaWaits::restore();
  delete library;
  delete batch_library;
  library = batch_library = nullptr;
}

// Set how operations on devices are timed from now on; numbers as in torch_timing.py.
COMMWATCH_API void cw_time_devices(int timing) { device_timing().store(device_failed().load() ? DeviceTiming::kOff : static_cast<DeviceTiming>(timing)); }

// NCCL will load our profiler plugin from this file. Returns 0 if it cannot be used.
COMMWATCH_API int cw_use_nccl_plugin(const char* path) { return NcclPlugin::use(path, Foreign::sink()) ? 1 : 0; }

// What standard error was when the probe came, with the fields of descriptor.OpenFile; all 0: there was none. Before cw_install.
COMMWATCH_API void cw_standard_error(uint64_t device, uint64_t inode, uint64_t kind, uint64_t flags, uint64_t born_ns) {
  StandardError::is({device, inode, kind, flags, born_ns});
}

// Begin to record. training_thread: its CPU clock; budget: fraction of the time that the probe may take. Returns the session.
COMMWATCH_API void* cw_install(int (*open)(void*, int, int, int), void (*add_group)(void*, const void*, const char*, const char*, int), int (*add_dtype)(const char*),
                              int (*add_op)(const char*), int training_thread, double budget) {
  static const int forked = pthread_atfork(nullptr, nullptr, [] {
    if (Session* const parents = current.exchange(nullptr)) parents->let_go();
    forks.fetch_add(1);
  });
  (void)forked;
  auto* session = new Session(Python{open, add_group, add_dtype, add_op}, training_thread, budget);
  current.store(session);
  return session;
}

// Called within `open` of that session, which may no longer be the current one: the ring is mapped at `mapped`. Returns 0, or errno.
COMMWATCH_API int cw_attach(void* opening, void* mapped, uint64_t slots) {
  auto* const session = static_cast<Session*>(opening);
  if (session->ring() != nullptr) return 0;
  return session->attach(mapped, slots);
}

// Called within `add_group`: describes the group. ranks: global ranks by group rank; empty if unknown.
COMMWATCH_API void cw_describe_group(void* group, int small_id, int size, int aligned, const int32_t* ranks, int count) {
  auto* described = static_cast<Group*>(group);
  described->small_id = static_cast<uint16_t>(small_id);
  described->size = size;
  described->aligned = aligned != 0;
  described->ranks.assign(ranks, ranks + count);
}

// A group with this name has been created.
COMMWATCH_API void cw_forget_group(const char* name) {
  const Entered entered;
  if (entered.get() != nullptr) entered.get()->forget(name);
}

// Record a step mark; the calling thread is the training thread.
COMMWATCH_API void cw_mark(int optimizer, uint32_t number, uint64_t began_ns, uint64_t ended_ns, uint8_t flags) {
  const Entered entered;
  if (entered.get() == nullptr) return;
  CudaWaits::compute_here(*entered.get());
  Record record;
  record.op = format::kStepMark;
  record.peer = optimizer;
  record.launch_ns = record.start_ns = began_ns;
  record.end_ns = ended_ns;
  record.seq = number;
  record.flags = flags;
  entered.get()->mark(record);
}

// Record a checksum of replicated parameters, with the fields of events.Checksum.
COMMWATCH_API void cw_checksum(uint16_t group, int set, int place, uint32_t count, uint32_t number, uint64_t plain,
                               uint64_t weighted, uint64_t taken_ns) {
  const Entered entered;
  Session* const session = entered.get();
  if (session == nullptr || session->ring() == nullptr || session->off.load(std::memory_order_relaxed)) return;
  Record record;
  record.op = format::kChecksum;
  record.group = group;
  record.peer = place;
  record.tag = set;
  record.size_bytes = plain;
  record.launch_ns = weighted;
  record.seq = count;
  record.waited_us = number;
  record.start_ns = taken_ns;
  session->ring()->write(record);
}

// Check one in so many collectives from now on; budget: fraction of the time that this may take. After cw_install.
COMMWATCH_API void cw_check_collectives(uint32_t every, double budget) {
  const Entered entered;
  if (entered.get() != nullptr) entered.get()->checks.begin(every, budget);
}

// A capture of a graph begins in this thread; it has ended; the graph is to be replayed; the replay was launched; the graph was destroyed. graph: a
// number used only once.
COMMWATCH_API void cw_capture_begins(uint64_t graph) {
  const Entered entered;
  if (entered.get() != nullptr) entered.get()->graphs.begin(graph);
}

COMMWATCH_API void cw_capture_ends(uint64_t graph) {
  const Entered entered;
  if (entered.get() != nullptr) entered.get()->graphs.end(graph);
}

COMMWATCH_API void cw_replay(uint64_t graph) {
  const Entered entered;
  Session* const session = entered.get();
  if (session == nullptr || session->ring() == nullptr || session->off.load(std::memory_order_relaxed)) return;
  const Cost cost(*session, Cost::due());
  try {
    Replay::begins(*session, graph);
  } catch (const std::exception& error) {
    session->fault("replay of a graph", error.what());
  }
}

COMMWATCH_API void cw_replayed() {
  const Entered entered;
  Replay::launched(entered.get());
}

COMMWATCH_API void cw_forget_graph(uint64_t graph) {
  const Entered entered;
  if (entered.get() != nullptr) entered.get()->graphs.forget(graph);
}

// Switch the probe off after a fault on the Python side.
COMMWATCH_API void cw_switch_off() {
  const Entered entered;
  if (entered.get() != nullptr) entered.get()->off.store(true);
}

// After cw_uninstall: whether the last operation has left; then the functions given to cw_install are no longer called.
COMMWATCH_API int cw_over(const void* session) { return static_cast<const Session*>(session)->over() ? 1 : 0; }

// Stop recording. Must not be called with the GIL held: the poller may need it to release a tensor.
COMMWATCH_API void cw_uninstall() {
  Session* const session = current.exchange(nullptr);
  if (session != nullptr) session->close();
}
