// Modules, libraries, kernels and their launches.
//
// What is in a module does not matter, but for the sizes of its variables: every name is a kernel of it. Kernels compute nothing,
// and last as long as their name says. Module and library, function and kernel are the same. Not played: the order of parameters.
#include <algorithm>
#include <unordered_map>

#include "image.h"
#include "memory.h"
#include "nccl.h"

using namespace played;

struct CUmod_st {
  const void* image;
  std::unordered_map<std::string, CUfunction> functions;
  std::unordered_map<std::string, std::pair<CUdeviceptr, size_t>> variables;
};
struct CUfunc_st {
  std::string name;
  CUmodule module;
  std::map<int, int> attributes;
};

namespace {

constexpr int kClockKHz = 1980000, kMultiprocessors = 132, kThreadsOfMultiprocessor = 2048, kMostSharedBytes = 232448;

CUmodule module_of(CUlibrary library) { return reinterpret_cast<CUmodule>(library); }
CUfunction function_of(CUkernel kernel) { return reinterpret_cast<CUfunction>(kernel); }

CUresult load(CUmodule* out, const void* image) { return answer(out, new CUmod_st{image, {}, {}}); }
CUresult load(CUlibrary* out, const void* image) { return load(reinterpret_cast<CUmodule*>(out), image); }

CUfunction find(CUmodule module, const char* name) {
  const Guard guard(lock());
  CUfunction& function = module->functions[name];
  if (function == nullptr) function = new CUfunc_st{name, module, {}};
  return function;
}

CUresult find_variable(CUdeviceptr* at, size_t* bytes, CUmodule module, const char* name) {
  const Guard guard(lock());
  auto& [there, size] = module->variables[name];
  if (there == 0) {
    size = variable_size(module->image, name);
    if (size == 0) return CUDA_ERROR_NOT_FOUND;
    if (const CUresult failed = allocate(&there, size, current_device())) return failed;
  }
  if (at != nullptr) *at = there;
  if (bytes != nullptr) *bytes = size;
  return CUDA_SUCCESS;
}

int attribute_of(CUfunction function, int attribute) {
  const Guard guard(lock());
  const auto set = function->attributes.find(attribute);
  if (set != function->attributes.end()) return set->second;
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: return 32;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: return 90;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: return 49152;
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: return -1;
    default: return 0;
  }
}

bool contains(const std::string& name, const std::string& part) { return name.find(part) != std::string::npos; }

Ns takes(const std::string& name, void** params) {
  Ns found = settings().kernel_ns;
  if (contains(name, "spin_kernel") && params != nullptr) {  // torch.cuda._sleep(cycles)
    found = static_cast<Ns>(static_cast<double>(*static_cast<int64_t*>(params[0])) * 1e6 / kClockKHz);
  }
  for (const auto& [part, ns] : settings().kernels) {
    if (contains(name, part)) found = ns;
  }
  return found;
}

// The address of a kernel's arguments: one buffer, or the first parameter.
const void* arguments(void** params, void** extra) {
  for (void** entry = extra; entry != nullptr && entry[0] != CU_LAUNCH_PARAM_END; entry += 2) {
    if (entry[0] == CU_LAUNCH_PARAM_BUFFER_POINTER) return entry[1];
  }
  return params == nullptr ? nullptr : params[0];
}

CUresult launch(CUfunction function, CUstream stream, void** params, void** extra, unsigned grid_x, unsigned block_x) {
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Work work;
  work.type = CU_GRAPH_NODE_TYPE_KERNEL;
  work.name = function->name;
  work.kernel.func = function;
  work.kernel.gridDimX = grid_x;
  work.kernel.blockDimX = block_x;
  work.kernel.gridDimY = work.kernel.gridDimZ = work.kernel.blockDimY = work.kernel.blockDimZ = 1;
  work.takes = takes(work.name, params);
  if (contains(work.name, "ncclDevKernel") || contains(work.name, "ncclSymk")) {
    work.takes = settings().nccl_ns;
    work.open = nccl_work(work.name, arguments(params, extra));
  }
  trace(2, "launch %s", work.name.c_str());
  return put(stream, std::move(work));
}

void record_attributes(const CUlaunchConfig& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const CUlaunchAttributeID id = config.attrs[i].id;
    const CUlaunchAttributeValue& value = config.attrs[i].value;
    if (id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT) cuEventRecord(value.launchCompletionEvent.event, config.hStream);
    if (id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT) cuEventRecord(value.programmaticEvent.event, config.hStream);
  }
}

}  // namespace

// -- modules and libraries

CUresult cuModuleLoad(CUmodule* out, const char*) {
  return play(__func__, [&] { return load(out, nullptr); });
}

CUresult cuModuleLoadData(CUmodule* out, const void* image) {
  return play(__func__, [&] { return load(out, image); });
}

CUresult cuModuleLoadDataEx(CUmodule* out, const void* image, unsigned, CUjit_option*, void**) {
  return play(__func__, [&] { return load(out, image); });
}

CUresult cuModuleLoadFatBinary(CUmodule* out, const void* image) {
  return play(__func__, [&] { return load(out, image); });
}

CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode* out) {
  return play(__func__, [&] { return answer(out, CU_MODULE_LAZY_LOADING); });
}

CUresult cuModuleGetFunction(CUfunction* out, CUmodule module, const char* name) {
  return play(__func__, [&] { return answer(out, find(module, name)); });
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr* at, size_t* bytes, CUmodule module, const char* name) {
  return play(__func__, [&] { return find_variable(at, bytes, module, name); });
}

CUresult cuLibraryLoadData(CUlibrary* out, const void* image, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) {
  return play(__func__, [&] { return load(out, image); });
}

CUresult cuLibraryLoadFromFile(CUlibrary* out, const char*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) {
  return play(__func__, [&] { return load(out, nullptr); });
}

CUresult cuLibraryGetKernel(CUkernel* out, CUlibrary library, const char* name) {
  return play(__func__, [&] { return answer(out, reinterpret_cast<CUkernel>(find(module_of(library), name))); });
}

CUresult cuLibraryGetModule(CUmodule* out, CUlibrary library) {
  return play(__func__, [&] { return answer(out, module_of(library)); });
}

CUresult cuLibraryGetGlobal(CUdeviceptr* at, size_t* bytes, CUlibrary library, const char* name) {
  return play(__func__, [&] { return find_variable(at, bytes, module_of(library), name); });
}

CUresult cuLibraryGetManaged(CUdeviceptr* at, size_t* bytes, CUlibrary library, const char* name) {
  return play(__func__, [&] { return find_variable(at, bytes, module_of(library), name); });
}

CUresult cuLibraryGetKernelCount(unsigned* out, CUlibrary) {
  return play(__func__, [&] { return answer(out, 0); });
}

// -- functions and kernels

CUresult cuKernelGetFunction(CUfunction* out, CUkernel kernel) {
  return play(__func__, [&] { return answer(out, function_of(kernel)); });
}

CUresult cuKernelGetLibrary(CUlibrary* out, CUkernel kernel) {
  return play(__func__, [&] { return answer(out, reinterpret_cast<CUlibrary>(function_of(kernel)->module)); });
}

CUresult cuKernelGetName(const char** out, CUkernel kernel) {
  return play(__func__, [&] { return answer(out, function_of(kernel)->name.c_str()); });
}

CUresult cuFuncGetName(const char** out, CUfunction function) {
  return play(__func__, [&] { return answer(out, function->name.c_str()); });
}

CUresult cuFuncGetModule(CUmodule* out, CUfunction function) {
  return play(__func__, [&] { return answer(out, function->module); });
}

CUresult cuFuncIsLoaded(CUfunctionLoadingState* out, CUfunction) {
  return play(__func__, [&] { return answer(out, CU_FUNCTION_LOADING_STATE_LOADED); });
}

// The parameters of a kernel are unknown, and this is the answer for one too many.
CUresult cuFuncGetParamInfo(CUfunction, size_t, size_t*, size_t*) {
  return play(__func__, [] { return CUDA_ERROR_INVALID_VALUE; });
}

CUresult cuKernelGetParamInfo(CUkernel, size_t, size_t*, size_t*) {
  return play(__func__, [] { return CUDA_ERROR_INVALID_VALUE; });
}

CUresult cuFuncGetAttribute(int* out, CUfunction_attribute attribute, CUfunction function) {
  return play(__func__, [&] { return answer(out, attribute_of(function, attribute)); });
}

CUresult cuKernelGetAttribute(int* out, CUfunction_attribute attribute, CUkernel kernel, CUdevice) {
  return play(__func__, [&] { return answer(out, attribute_of(function_of(kernel), attribute)); });
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  return play(__func__, [&] {
    const Guard guard(lock());
    return answer(&function->attributes[attribute], value);
  });
}

CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice) {
  return cuFuncSetAttribute(function_of(kernel), attribute, value);
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, CUfunction, int threads, size_t, unsigned) {
  return play(__func__, [&] { return answer(out, std::clamp(kThreadsOfMultiprocessor / std::max(1, threads), 1, 32)); });
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* out, CUfunction function, int threads, size_t bytes) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, function, threads, bytes, 0);
}

CUresult cuOccupancyMaxPotentialBlockSize(int* grid, int* block, CUfunction, CUoccupancyB2DSize, size_t, int) {
  return play(__func__, [&] {
    *block = 1024;
    return answer(grid, kMultiprocessors);
  });
}

CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t* out, CUfunction, int, int) {
  return play(__func__, [&] { return answer(out, kMostSharedBytes); });
}

CUresult cuOccupancyMaxPotentialClusterSize(int* out, CUfunction, const CUlaunchConfig*) {
  return play(__func__, [&] { return answer(out, 8); });
}

CUresult cuOccupancyMaxActiveClusters(int* out, CUfunction, const CUlaunchConfig*) {
  return play(__func__, [&] { return answer(out, kMultiprocessors / 2); });
}

// -- launches

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned, unsigned, unsigned block_x, unsigned, unsigned, unsigned,
                        CUstream stream, void** params, void** extra) {
  return play(__func__, [&] { return launch(function, stream, params, extra, grid_x, block_x); });
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** params, void** extra) {
  return play(__func__, [&] {
    const CUresult result = launch(function, config->hStream, params, extra, config->gridDimX, config->blockDimX);
    if (result == CUDA_SUCCESS) record_attributes(*config);
    return result;
  });
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned, unsigned, unsigned block_x, unsigned, unsigned, unsigned,
                                   CUstream stream, void** params) {
  return play(__func__, [&] { return launch(function, stream, params, nullptr, grid_x, block_x); });
}
