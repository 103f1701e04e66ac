// Replaces functions that libraries of this process import.
//
// A library calls an imported function through its table of addresses. All of its calls can be observed there, even if neither the caller
// nor the function has a hook. A function that a debugger or another profiler has replaced is left alone. Does not depend on torch.
#pragma once

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <vector>

namespace commwatch {

class Imports {
 public:
  struct Function {
    const char* name;
    void* original;
    void* ours;
  };

  Imports() = default;
  Imports(const Imports&) = delete;
  Imports& operator=(const Imports&) = delete;

  // Replace these functions in the loaded libraries whose file name begins with one of `libraries`. Returns false, with nothing replaced, if
  // a library calls a function that is not the original, or if the tables cannot be written.
  bool replace(std::vector<Function> functions, std::vector<std::string> libraries) {
    functions_ = std::move(functions);
    libraries_ = std::move(libraries);
    foreign_ = false;
    dl_iterate_phdr(&Imports::visit, this);
    if (foreign_ || places_.empty()) {
      places_.clear();
      return false;
    }
    for (size_t done = 0; done < places_.size(); ++done) {
      if (write(places_[done], places_[done].function->ours)) continue;
      places_.resize(done);
      restore();
      return false;
    }
    return true;
  }

  void restore() {
    for (const Place& place : places_) {
      // Another tool may have replaced ours since.
      if (__atomic_load_n(place.address, __ATOMIC_SEQ_CST) == place.function->ours) write(place, place.before);
    }
    places_.clear();
  }

  size_t count() const { return places_.size(); }

 private:
  struct Place {
    void** address;
    void* before;
    const Function* function;
    bool read_only;
  };

  // What a library says of itself.
  struct Library {
    const char* names = nullptr;
    const ElfW(Sym)* symbols = nullptr;
    // Relocations of functions, and of other addresses, with their sizes in bytes.
    const ElfW(Rela)* tables[2] = {};
    size_t sizes[2] = {};
    uintptr_t read_only_from = 0, read_only_to = 0;
    uintptr_t from = UINTPTR_MAX, to = 0;
  };

#if defined(__x86_64__)
  static constexpr unsigned kSlot = R_X86_64_JUMP_SLOT, kAddress = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
  static constexpr unsigned kSlot = R_AARCH64_JUMP_SLOT, kAddress = R_AARCH64_GLOB_DAT;
#else
  static constexpr unsigned kSlot = ~0u, kAddress = ~0u;  // unknown architecture: nothing is found
#endif

  static int visit(dl_phdr_info* info, size_t, void* self) {
    static_cast<Imports*>(self)->look(*info);
    return 0;
  }

  void look(const dl_phdr_info& info) {
    const char* const slash = strrchr(info.dlpi_name, '/');
    const std::string name = slash != nullptr ? slash + 1 : info.dlpi_name;
    bool wanted = false;
    for (const std::string& prefix : libraries_) wanted = wanted || name.compare(0, prefix.size(), prefix) == 0;
    if (!wanted) return;
    const Library library = read(info);
    if (library.names == nullptr || library.symbols == nullptr) return;
    for (int kind = 0; kind < 2; ++kind) {
      for (size_t i = 0; i < library.sizes[kind] / sizeof(ElfW(Rela)); ++i) consider(library, library.tables[kind][i], info.dlpi_addr);
    }
  }

  static Library read(const dl_phdr_info& info) {
    Library library;
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      const ElfW(Phdr)& header = info.dlpi_phdr[i];
      const uintptr_t begin = info.dlpi_addr + header.p_vaddr;
      if (header.p_type == PT_LOAD) {
        library.from = begin < library.from ? begin : library.from;
        library.to = begin + header.p_memsz > library.to ? begin + header.p_memsz : library.to;
      } else if (header.p_type == PT_GNU_RELRO) {
        library.read_only_from = begin & ~(page - 1);
        library.read_only_to = (begin + header.p_memsz) & ~(page - 1);
      } else if (header.p_type == PT_DYNAMIC) {
        for (auto* entry = reinterpret_cast<const ElfW(Dyn)*>(begin); entry->d_tag != DT_NULL; ++entry) take(info.dlpi_addr, *entry, &library);
      }
    }
    return library;
  }

  static void take(uintptr_t base, const ElfW(Dyn)& entry, Library* library) {
    // glibc writes absolute addresses there, musl leaves what the file has.
    const uintptr_t address = entry.d_un.d_ptr < base ? base + entry.d_un.d_ptr : entry.d_un.d_ptr;
    switch (entry.d_tag) {
      case DT_STRTAB: library->names = reinterpret_cast<const char*>(address); break;
      case DT_SYMTAB: library->symbols = reinterpret_cast<const ElfW(Sym)*>(address); break;
      case DT_JMPREL: library->tables[0] = reinterpret_cast<const ElfW(Rela)*>(address); break;
      case DT_PLTRELSZ: library->sizes[0] = entry.d_un.d_val; break;
      case DT_RELA: library->tables[1] = reinterpret_cast<const ElfW(Rela)*>(address); break;
      case DT_RELASZ: library->sizes[1] = entry.d_un.d_val; break;
      default: break;
    }
  }

  void consider(const Library& library, const ElfW(Rela)& relocation, uintptr_t base) {
    const auto type = static_cast<unsigned>(ELF64_R_TYPE(relocation.r_info));
    if (type != kSlot && type != kAddress) return;
    const char* const name = library.names + library.symbols[ELF64_R_SYM(relocation.r_info)].st_name;
    for (const Function& function : functions_) {
      if (strcmp(name, function.name) != 0) continue;
      const uintptr_t address = base + relocation.r_offset;
      void** const place = reinterpret_cast<void**>(address);
      void* const before = *place;
      const auto target = reinterpret_cast<uintptr_t>(before);
      // Until its first call, the address of a function may be one in the library itself, which looks for the function.
      const bool original = before == function.original || (library.from <= target && target < library.to);
      foreign_ = foreign_ || !original;
      places_.push_back({place, before, &function, library.read_only_from <= address && address < library.read_only_to});
    }
  }

  static bool write(const Place& place, void* value) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    void* const start = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(place.address) & ~(page - 1));
    if (place.read_only && mprotect(start, page, PROT_READ | PROT_WRITE) != 0) return false;
    __atomic_store_n(place.address, value, __ATOMIC_SEQ_CST);
    if (place.read_only) mprotect(start, page, PROT_READ);
    return true;
  }

  std::vector<Function> functions_;
  std::vector<std::string> libraries_;
  std::vector<Place> places_;
  bool foreign_ = false;
};

}  // namespace commwatch
