// What generate.py makes of NVIDIA's headers, and what its functions call. Does not include cuda.h: the generated functions have
// the names that are declared there, and no parameters.
#pragma once

#include <cstddef>

namespace played {

// The name of a CUresult; null: there is none of this number.
const char* error_name(int error);

// Functions have had several shapes: since which version of CUDA a name means which symbol. By name, the newest first.
struct Shape {
  const char* name;
  int since;
  const char* symbol;
};
extern const Shape kShapes[];
extern const size_t kShapeCount;

int not_played(const char* function);  // notes it; returns CUDA_ERROR_NOT_SUPPORTED
int do_nothing(const char* function);  // counts it; returns CUDA_SUCCESS

}  // namespace played
