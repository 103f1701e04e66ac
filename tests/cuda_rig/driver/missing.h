// Functions that are asked for and not played.
#pragma once

#include <cuda.h>

#include <string>

namespace played {

// A function that notes its name as missing and returns `result`; the same for the same name. Null: there are too many.
void* stand_in(const std::string& name, CUresult result);

}  // namespace played
