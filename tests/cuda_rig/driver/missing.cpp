// What is not played: the functions behind the generated ones, and functions that are made at run time for names that cuda.h does
// not have (newer ones, and slots of the runtime's tables).
#include "missing.h"

#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "generated.h"
#include "report.h"

namespace played {
namespace {

constexpr size_t kMost = 1024;

struct StandIn {
  std::string name;
  CUresult result = CUDA_SUCCESS;
};
StandIn* stand_ins() {
  static auto* all = new StandIn[kMost];  // never destroyed: others' destructors still call the driver
  return all;
}

template <size_t I>
CUresult called() {
  note_missing(stand_ins()[I].name);
  return stand_ins()[I].result;
}

template <size_t... I>
std::array<void*, sizeof...(I)> addresses_of(std::index_sequence<I...>) {
  return {reinterpret_cast<void*>(&called<I>)...};
}

}  // namespace

void* stand_in(const std::string& name, CUresult result) {
  static const auto addresses = addresses_of(std::make_index_sequence<kMost>());
  static std::mutex mutex;
  static size_t used = 0;
  const std::lock_guard<std::mutex> guard(mutex);
  StandIn* const all = stand_ins();
  size_t at = 0;
  while (at < used && all[at].name != name) ++at;
  if (at == kMost) return nullptr;
  if (at == used) {
    all[at] = {name, result};
    ++used;
  }
  return addresses[at];
}

int not_played(const char* function) {
  note_missing(function);
  return CUDA_ERROR_NOT_SUPPORTED;
}

int do_nothing(const char* function) {
  static std::mutex mutex;
  static auto* all = new std::map<std::string, Calls*>;
  Calls* calls;
  {
    const std::lock_guard<std::mutex> guard(mutex);
    Calls*& found = (*all)[function];
    if (found == nullptr) found = &Calls::of(function);
    calls = found;
  }
  calls->of_this_thread().fetch_add(1);
  return is_lost() ? CUDA_ERROR_DEVICE_UNAVAILABLE : ready() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

}  // namespace played
