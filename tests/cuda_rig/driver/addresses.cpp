// How the runtime, NCCL and cuBLAS find the driver's functions: cuGetProcAddress, by name and version of CUDA.
//
// A name that is not played gets a function that fails, not "not found": whoever asks for all names at its start goes on.
#include <dlfcn.h>
#include <string.h>

#include <algorithm>

#include "generated.h"
#include "missing.h"
#include "report.h"

using namespace played;

namespace {

void* ours(const char* symbol) {
  static void* const self = [] {
    Dl_info about;
    dladdr(reinterpret_cast<void*>(&cuInit), &about);
    return dlopen(about.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }();
  return dlsym(self, symbol);
}

// The symbol that a name means to a caller who was built for this version; for older ones than known, the oldest.
const char* symbol_of(const std::string& name, int version) {
  const char* found = nullptr;
  for (const Shape* shape = kShapes; shape != kShapes + kShapeCount; ++shape) {
    if (name != shape->name) continue;
    found = shape->symbol;
    if (version >= shape->since) break;
  }
  return found != nullptr ? found : name.c_str();
}

void* function_of(std::string name, int version) {
  for (const char* suffix : {"_ptsz", "_ptds"}) {  // with default streams per thread: the same here
    const size_t at = name.size() - std::min(name.size(), strlen(suffix));
    if (name.compare(at, std::string::npos, suffix) == 0) name.resize(at);
  }
  const char* const symbol = symbol_of(name, version);
  void* const found = ours(symbol);
  return found != nullptr ? found : stand_in(symbol, CUDA_ERROR_NOT_SUPPORTED);
}

}  // namespace

CUresult cuGetProcAddress_v2(const char* name, void** out, int version, cuuint64_t, CUdriverProcAddressQueryResult* status) {
  const bool too_new = version > CUDA_VERSION;
  const bool found = !too_new && strncmp(name, "cu", 2) == 0;
  trace(3, "address of %s for %d", name, version);
  *out = found ? function_of(name, version) : nullptr;
  if (status != nullptr) {
    *status = found     ? CU_GET_PROC_ADDRESS_SUCCESS
              : too_new ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                        : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  }
  return found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuGetProcAddress(const char* name, void** out, int version, cuuint64_t flags) {
  return cuGetProcAddress_v2(name, out, version, flags, nullptr);
}
