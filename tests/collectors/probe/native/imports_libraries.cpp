// Three libraries, by macro: one with a function, and two that call it.
#ifdef LIBRARY_runtime
extern "C" int runtime_number(int number) { return number; }
#endif
#ifdef LIBRARY_torch_user
extern "C" int runtime_number(int);
extern "C" int torch_calls(int number) { return runtime_number(number); }
int (*torch_pointer)(int) = runtime_number;
#endif
#ifdef LIBRARY_others_user
extern "C" int runtime_number(int);
extern "C" int others_call(int number) { return runtime_number(number); }
#endif
