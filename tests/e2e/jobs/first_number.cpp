// Sets the next number of a group of the native hook. Built with the hook's own headers.
#include "groups.h"

extern "C" void first_number(void* group, uint32_t number) { static_cast<commwatch::Group*>(group)->next_seq.store(number); }
