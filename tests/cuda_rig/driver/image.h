// Reads the images of modules.
#pragma once

#include <cstddef>

namespace played {

// Size of a variable in a module's image; 0: it has none of that name.
size_t variable_size(const void* image, const char* name);

}  // namespace played
