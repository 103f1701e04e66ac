// The runtime's own tables, which cuGetExportTable returns by number.
//
// They are not documented. Numbers, slots and fixed answers are facts from ZLUDA's dark_api (NOTICE). A table begins with its own
// size in bytes, but for the context's storage. All slots have to be callable: those that are not known do nothing, and are noted.
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "handles.h"
#include "md2.h"
#include "missing.h"

using namespace played;

namespace {

constexpr char kRuntime[] = "6bd5fb6c5bf4e74a8987d93912fd9df9", kIntegrity[] = "d4082055bde6704b8d34ba123c66e1f2";
constexpr size_t kSlotsOfUnknown = 96;

struct Table {
  std::string id;
  std::vector<void*> slots;
};

// -- functions in them

CUresult nothing() { return CUDA_SUCCESS; }

CUresult primary_of(CUcontext* out, CUdevice device) { return answer(out, primary(device)); }

CUresult module_of(CUmodule* out, const void* image) { return cuModuleLoadData(out, image); }
CUresult module_of_6(CUmodule* out, const void* image, void*, void*, unsigned) { return cuModuleLoadData(out, image); }
CUresult module_of_8(const void* image, CUmodule* out, void*, void*, unsigned) { return cuModuleLoadData(out, image); }

// Room that the runtime writes to.
template <size_t kWords>
void room(void** out, size_t* words) {
  static uint32_t room[kWords];
  *out = room;
  *words = kWords;
}

CUresult context_check(CUcontext, uint32_t* first, const void**) { return answer(first, 0); }

// What the runtime keeps with a context, by key. A null context: the current one.
template <class Body>
CUresult with_storage(CUcontext context, Body body) {
  if (context == nullptr) context = current();
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  const Guard guard(lock());
  return body(context->storage);
}

CUresult storage_put(CUcontext context, void* key, void* value, void (*)(CUcontext, void*, void*)) {
  return with_storage(context, [&](auto& storage) { return answer(&storage[key], value); });
}

CUresult storage_delete(CUcontext context, void* key) {
  return with_storage(context, [&](auto& storage) {
    storage.erase(key);
    return CUDA_SUCCESS;
  });
}

CUresult storage_get(void** value, CUcontext context, void* key) {
  return with_storage(context, [&](auto& storage) {
    const auto found = storage.find(key);
    return found == storage.end() ? CUDA_ERROR_INVALID_HANDLE : answer(value, found->second);
  });
}

CUresult integrity(uint32_t version, uint64_t seconds, uint64_t out[2]);

// -- the tables

template <class F>
void* at(F* function) {
  return reinterpret_cast<void*>(function);
}

Table table(const char* id, size_t count, std::initializer_list<std::pair<size_t, void*>> known) {
  Table made{id, std::vector<void*>(count)};
  made.slots[0] = reinterpret_cast<void*>(count * sizeof(void*));
  for (const auto& [slot, function] : known) made.slots[slot] = function;
  return made;
}

std::vector<Table>& tables() {
  static auto* all = new std::vector<Table>{
      // The last slot: since CUDA 13.2, called once at a capture. It is not known for what.
      table(kRuntime, 13, {{1, at(module_of)}, {2, at(primary_of)}, {6, at(module_of_6)}, {8, at(module_of_8)}, {12, at(nothing)}}),
      table("42d85a8123f6cb478298f6e78a3aecdc", 4, {{2, at(nothing)}}),
      table("a094798c2e742e7493f20800200c0a66", 7, {{2, at(room<1024>)}, {6, at(room<14>)}}),
      table("c693336e1121df11a8c368f355d89593", 4, {{0, at(storage_put)}, {1, at(storage_delete)}, {2, at(storage_get)}}),
      table(kIntegrity, 3, {{1, at(integrity)}}),
      table("263e88607cd2614392f6bbd5006dfa7e", 4, {{2, at(context_check)}, {3, at(nothing)}}),
      table("f8cff95121468b4eb9e2fb469e7c0dd9", 3, {{2, at(nothing)}}),  // since CUDA 13: called for each kernel that is looked at
      table("21318c60971432488ca641ff7324c8f2", 8, {{4, at(nothing)}}),  // of the runtime in cuBLAS 13.1
  };
  return *all;
}

Table& find(const std::string& id) {
  for (Table& known : tables()) {
    if (known.id == id) return known;
  }
  note_missing("table " + id);
  tables().push_back(table(id.c_str(), kSlotsOfUnknown, {}));
  return tables().back();
}

// The runtime makes sure of its driver: HMAC-MD2 under a key of its own, over what the two know of each other.
CUresult integrity(uint32_t version, uint64_t seconds, uint64_t out[2]) {
  if (version % 10 < 2) {
    out[0] = version % 10 == 0 ? 0x3341181C03CB675CULL : 0x1841181C03CB675CULL;
    out[1] = 0x8ED383AA1F4CD1E8ULL;
    return CUDA_SUCCESS;
  }
  static constexpr uint8_t kKey[16] = {0x14, 0x6A, 0xDD, 0xAE, 0x53, 0xA9, 0xA7, 0x52, 0xAA, 0x08, 0x41, 0x36, 0x0B, 0xF5, 0x5A, 0x9F};
  const auto &runtime = find(kRuntime).slots, &checks = find(kIntegrity).slots;
  const struct {
    uint32_t driver, version, process, thread;
    const void *runtime, *checks, *function;
    uint64_t seconds;
  } about{CUDA_VERSION, version,       static_cast<uint32_t>(getpid()), static_cast<uint32_t>(pthread_self()),
          runtime.data(), checks.data(), checks[1],                       seconds};
  HmacMd2 hash(kKey);
  hash.add(&about, sizeof about);
  for (int device = 0; device < device_count(); ++device) {
    struct {
      CUuuid uuid;
      int32_t domain, bus, device;
    } card{};
    cuDeviceGetUuid_v2(&card.uuid, device);
    card.bus = bus_of(device);
    hash.add(&card, sizeof card);
  }
  hash.end(reinterpret_cast<uint8_t*>(out));
  return CUDA_SUCCESS;
}

}  // namespace

CUresult cuGetExportTable(const void** out, const CUuuid* uuid) {
  return counted(__func__, [&] {
    char id[33];
    for (int i = 0; i < 16; ++i) snprintf(id + 2 * i, 3, "%02x", static_cast<unsigned char>(uuid->bytes[i]));
    static std::mutex mutex;
    const Guard guard(mutex);
    std::vector<void*>& slots = find(id).slots;
    for (size_t i = 0; i < slots.size(); ++i) {
      if (slots[i] == nullptr) slots[i] = stand_in("table " + std::string(id) + "[" + std::to_string(i) + "]", CUDA_SUCCESS);
    }
    return answer(out, slots.data());
  });
}
