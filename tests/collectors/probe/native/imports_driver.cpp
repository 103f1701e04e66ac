// Tests the replacement of imported functions in the libraries of imports_libraries.cpp.
#include "imports.h"

#include <stdio.h>
#include <stdlib.h>

extern "C" int runtime_number(int);
extern "C" int torch_calls(int);
extern "C" int others_call(int);

namespace {

int ours(int number) { return runtime_number(number) + 100; }
int foreign(int number) { return runtime_number(number) + 1000; }

void check(bool holds, const char* name) {
  if (holds) return;
  fprintf(stderr, "FAILED: %s\n", name);
  exit(1);
}

commwatch::Imports::Function number(int (*function)(int)) {
  void* const original = dlsym(RTLD_DEFAULT, "runtime_number");
  return {"runtime_number", original, reinterpret_cast<void*>(function)};
}

}  // namespace

int main() {
  commwatch::Imports imports, others;
  check(!imports.replace({number(ours)}, {"libnobody"}) && imports.count() == 0, "no library has this name");
  for (int round = 0; round < 2; ++round) {
    check(imports.replace({number(ours)}, {"libtorch"}), "replaced");
    check(torch_calls(1) == 101, "the library calls ours");
    check(others_call(1) == 1 && runtime_number(1) == 1, "other libraries do not");
    check(!others.replace({number(foreign)}, {"libtorch", "libothers"}), "a function that is not the original stays");
    check(torch_calls(1) == 101 && others_call(1) == 1, "and nothing else is replaced");
    imports.restore();
    check(torch_calls(1) == 1 && imports.count() == 0, "restored");
  }
  return 0;
}
