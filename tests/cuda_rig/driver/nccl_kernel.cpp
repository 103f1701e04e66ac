// Kernels of NCCL's, whose ranks meet.
//
// The ranks of a communicator meet in shared memory: a collective ends for all of them at once, a given time after the last one's
// kernel has begun; send and recv end together in pairs. Data is really moved and added, read from the other process; where that
// takes longer than was to be played, the collective takes as long as it took. Not played: how NCCL moves data (rings, channels,
// proxies) and PreMulSum.
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "nccl.h"
#include "nccl_data.h"
#include "report.h"

namespace played {
namespace {

constexpr const char* kNames[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce",
                                  "AllToAll", "Gather", "Scatter", "Send", "Recv"};
const char* name_of(uint32_t coll) { return coll < 10 ? kNames[coll] : "?"; }

// One rank's part in one collective, or one side of a message. What it says is valid once `came` is its number.
struct Part {
  std::atomic<uint64_t> came, read;  // number + 1 of what the rank has come to, and has taken the others' data of
  int64_t begin, read_at;
  int32_t pid, type, op, root;
  uint64_t from, count;
  uint32_t coll, unused;
};
struct Message {
  Part sent, wanted;
};
constexpr uint64_t kWindow = 512, kPairWindow = 64;  // so many may be under way

[[noreturn]] void fail(const std::string& what) {
  dprintf(STDERR_FILENO, "played: %s\n", what.c_str());
  ::abort();
}

}  // namespace

// A file: how many have come, the ranks' parts, and the messages of each pair. All zero at first; gone once all ranks have mapped it.
class Communicator {
 public:
  Communicator(uint64_t id, int rank, int ranks)
      : id(id), rank(rank), ranks(ranks), sent_(static_cast<size_t>(ranks)), wanted_(static_cast<size_t>(ranks)) {
    char name[64];
    snprintf(name, sizeof name, "/played-comm-%016lx", id);
    const std::string path = settings().shm + name;
    const size_t n = static_cast<size_t>(ranks), size = kPartsAt + n * kWindow * sizeof(Part) + n * n * kPairWindow * sizeof(Message);
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) fail(path + ": cannot be made");
    void* const at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) fail(path + ": cannot be mapped");
    base_ = static_cast<char*>(at);
    if (reinterpret_cast<std::atomic<int>*>(base_)->fetch_add(1) + 1 == ranks) unlink(path.c_str());
  }

  Part& part(int of, uint64_t number) {
    return reinterpret_cast<Part*>(base_ + kPartsAt)[static_cast<uint64_t>(of) * kWindow + number % kWindow];
  }
  Message& message(int from, int to, uint64_t number) {
    auto* const first = reinterpret_cast<Message*>(base_ + kPartsAt + static_cast<size_t>(ranks) * kWindow * sizeof(Part));
    return first[static_cast<size_t>(from * ranks + to) * kPairWindow + number % kPairWindow];
  }

  uint64_t next() { return colls_++; }
  uint64_t next_sent(int to) { return sent_[static_cast<size_t>(to)]++; }
  uint64_t next_wanted(int from) { return wanted_[static_cast<size_t>(from)]++; }

  const uint64_t id;
  const int rank, ranks;
  std::atomic<bool> aborted{false};

 private:
  static constexpr size_t kPartsAt = 64;
  char* base_;
  uint64_t colls_ = 0;
  std::vector<uint64_t> sent_, wanted_;  // by peer
};

namespace {

// One call of a kernel's, and how far it is.
class Side {
 public:
  Side(Communicator& comm, const NcclCall& call) : call(call), comm_(comm) {
    if (call.coll == Coll::kSend) {
      number = comm.next_sent(call.peer);
      mine_ = &comm.message(comm.rank, call.peer, number).sent;
    } else if (call.coll == Coll::kRecv) {
      number = comm.next_wanted(call.peer);
      mine_ = &comm.message(call.peer, comm.rank, number).wanted;
    } else {
      number = comm.next();
      mine_ = &comm.part(comm.rank, number);
    }
  }

  bool is_message() const { return call.coll == Coll::kSend || call.coll == Coll::kRecv; }
  uint64_t bytes() const { return call.count * size_of_type(call.type); }

  void come(Ns began) {
    mine_->begin = began;
    mine_->pid = getpid();
    mine_->type = call.type;
    mine_->op = call.op;
    mine_->root = call.peer;
    mine_->from = reinterpret_cast<uint64_t>(call.from);
    mine_->count = call.count;
    mine_->coll = static_cast<uint32_t>(call.coll);
    mine_->came.store(number + 1);
  }

  // Whether all that take part are there, and have begun.
  bool meet() {
    if (met_) return true;
    const bool all = each([&](const Part& part) {
      if (part.came.load() < number + 1) return false;
      begin = std::max(begin, part.begin);
      return true;
    });
    return met_ = all && now() >= begin;
  }

  void read() {
    if (call.coll == Coll::kSend) return;
    if (settings().data && is_message()) receive();
    if (settings().data && !is_message()) gather();
    mine_->read_at = settings().data ? now() : 0;
    mine_->read.store(number + 1);
    wake();
  }

  // last: when the last of them had.
  bool all_have_read(Ns& last) {
    const auto has_read = [&](const Part& part) {
      if (part.read.load() < number + 1) return false;
      last = std::max(last, part.read_at);
      return true;
    };
    return is_message() ? has_read(message().wanted) : each(has_read);
  }

  void write() const {
    if (!got_.empty()) memcpy(call.to, got_.data(), got_.size());
  }

  const NcclCall call;
  uint64_t number;
  Ns begin = 0;  // of the last that came

 private:
  Message& message() {
    const bool sends = call.coll == Coll::kSend;
    return comm_.message(sends ? comm_.rank : call.peer, sends ? call.peer : comm_.rank, number);
  }

  // Whether it holds for all parts.
  template <class Holds>
  bool each(Holds holds) {
    if (is_message()) return holds(message().sent) && holds(message().wanted);
    for (int rank = 0; rank < comm_.ranks; ++rank) {
      if (!holds(comm_.part(rank, number))) return false;
    }
    return true;
  }

  // Append so many elements of a rank's.
  static void take(std::vector<char>& to, const Part& part, uint64_t first, uint64_t count, int type) {
    const size_t element = size_of_type(type), had = to.size();
    to.resize(had + count * element);
    read_from(part.pid, to.data() + had, part.from + first * element, count * element);
  }
  void take(int rank, uint64_t first) { take(got_, comm_.part(rank, number), first, call.count, call.type); }

  void receive() {
    const Part& sent = message().sent;
    if (sent.count * size_of_type(sent.type) != bytes()) trace(1, "a message has two sizes");
    take(got_, sent, 0, call.count, call.type);
  }

  bool all_agree() {
    return each([&](const Part& part) {
      if (part.coll == static_cast<uint32_t>(call.coll) && part.count == call.count) return true;
      dprintf(STDERR_FILENO, "played: ranks of a communicator disagree: rank %d has %s of %lu, another one %s of %lu\n", comm_.rank,
              name_of(static_cast<uint32_t>(call.coll)), call.count, name_of(part.coll), part.count);
      return false;
    });
  }

  void gather() {
    if (!all_agree()) return;
    const int me = comm_.rank, ranks = comm_.ranks;
    const uint64_t mine = static_cast<uint64_t>(me) * call.count;
    switch (call.coll) {
      case Coll::kBroadcast: return take(call.peer, 0);
      case Coll::kScatter: return take(call.peer, mine);
      case Coll::kAllGather:
      case Coll::kAllToAll:
        for (int rank = 0; rank < ranks; ++rank) take(rank, call.coll == Coll::kAllToAll ? mine : 0);
        return;
      case Coll::kGather:
        for (int rank = 0; rank < ranks && me == call.peer; ++rank) take(rank, 0);
        return;
      case Coll::kReduce:
        if (me == call.peer) reduce(0);
        return;
      case Coll::kReduceScatter: return reduce(mine);
      default: return reduce(0);
    }
  }

  void reduce(uint64_t first) {
    take(0, first);
    for (int rank = 1; rank < comm_.ranks; ++rank) {
      std::vector<char> other;
      take(other, comm_.part(rank, number), first, call.count, call.type);
      combine(got_.data(), other.data(), call.count, call.type, call.op);
    }
    if (call.op >= kNcclAvg) divide(got_.data(), call.count, call.type, comm_.ranks);
  }

  Communicator& comm_;
  Part* mine_;
  bool met_ = false;
  std::vector<char> got_;
};

// A kernel under way. Data is moved without the engine's lock: read as soon as all have come, written as soon as all have read.
class Kernel : public Open {
 public:
  Kernel(std::string name, std::shared_ptr<Communicator> comm, std::vector<NcclCall> calls, std::shared_ptr<Counters> counters,
         Counters::Works works)
      : name_(std::move(name)), comm_(std::move(comm)), calls_(std::move(calls)), counters_(std::move(counters)), works_(std::move(works)) {}

  void begun(Op& op) override {
    const auto messages = std::count_if(calls_.begin(), calls_.end(), [](const NcclCall& call) { return call.coll >= Coll::kSend; });
    if (calls_.size() > (messages != 0 ? kPairWindow : kWindow)) fail("too many operations in one kernel of NCCL's");
    for (const NcclCall& call : calls_) {
      Side& side = sides_.emplace_back(*comm_, call);
      if (!side.is_message()) first_ = std::min(first_, side.number);
      side.come(op.begin);
    }
    wake();
  }

  std::function<void()> errand() override {
    if (comm_->aborted) return {};
    if (state_ == State::kComing && each([](Side& side) { return side.meet(); })) {
      state_ = State::kReading;
      return [this] {
        for (Side& side : sides_) side.read();
        state_ = State::kRead;
      };
    }
    if (state_ == State::kRead && each([this](Side& side) { return side.all_have_read(read_at_); })) {
      state_ = State::kWriting;
      return [this] {
        for (const Side& side : sides_) side.write();
        state_ = State::kWritten;
      };
    }
    return {};
  }

  Ns poll(Op& op) override {
    if (counters_ && first_works_.empty() && now() >= op.begin) first_works_ = counters_->begin(works_, op.begin);
    const State state = state_;
    const bool busy = state == State::kReading || state == State::kWriting;  // the other thread has this kernel
    if (comm_->aborted && !busy) return finish(op, std::max(op.begin, now()), true);
    if (state != State::kWritten) return kUnknown;
    Ns last = op.begin;
    for (const Side& side : sides_) last = std::max(last, side.begin);
    const Ns played = last + settings().nccl_ns + static_cast<Ns>(wire_bytes() / settings().nccl_gbps);
    return finish(op, std::max(read_at_, played), false);
  }

 private:
  enum class State { kComing, kReading, kRead, kWriting, kWritten };

  template <class Holds>
  bool each(Holds holds) {
    return std::all_of(sides_.begin(), sides_.end(), holds);
  }

  // What goes over a rank's links, in the direction with more.
  double wire_bytes() const {
    const double n = comm_->ranks;
    double sent = 0, received = 0;
    for (const Side& side : sides_) {
      const auto bytes = static_cast<double>(side.bytes());
      double both = 0;
      switch (side.call.coll) {
        case Coll::kSend: sent += bytes; break;
        case Coll::kRecv: received += bytes; break;
        case Coll::kAllReduce: both = 2 * (n - 1) / n * bytes; break;
        case Coll::kBroadcast:
        case Coll::kReduce: both = bytes; break;
        default: both = (n - 1) * bytes; break;
      }
      sent += both;
      received += both;
    }
    return std::max(sent, received);
  }

  Ns finish(Op& op, Ns end, bool aborted) {
    std::string ops;
    uint64_t bytes = 0;
    for (const Side& side : sides_) {
      ops += (ops.empty() ? "" : " ") + std::string(name_of(static_cast<uint32_t>(side.call.coll))) + ":" + std::to_string(side.bytes());
      bytes += side.bytes();
    }
    if (counters_) {
      if (first_works_.empty()) first_works_ = counters_->begin(works_, op.begin);
      op.effect = [counters = counters_, works = works_, first = first_works_, end] { counters->end(works, first, end); };
    }
    note_nccl({name_, ops, comm_->id, comm_->rank, comm_->ranks, op.device, first_, bytes, op.queued, op.begin, end, aborted, op.replayed});
    return end;
  }

  const std::string name_;
  const std::shared_ptr<Communicator> comm_;
  const std::vector<NcclCall> calls_;
  const std::shared_ptr<Counters> counters_;
  const Counters::Works works_;
  std::vector<uint64_t> first_works_;  // once it has begun
  std::vector<Side> sides_;
  uint64_t first_ = UINT64_MAX;
  std::atomic<State> state_{State::kComing};
  Ns read_at_ = 0;
};

}  // namespace

std::shared_ptr<Communicator> meet(uint64_t id, int rank, int ranks) { return std::make_shared<Communicator>(id, rank, ranks); }

void give_up(Communicator& communicator) { communicator.aborted = true; }

MakeOpen nccl_kernel(const std::string& name, std::shared_ptr<Communicator> communicator, std::vector<NcclCall> calls,
                     std::shared_ptr<Counters> counters, Counters::Works works) {
  return [=] { return std::make_unique<Kernel>(name, communicator, calls, counters, works); };
}

}  // namespace played
