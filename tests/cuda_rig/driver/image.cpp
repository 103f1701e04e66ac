// What is in a module's image: only the sizes of its variables are wanted, for the runtime compares them with its own.
//
// Reads ELF, and fat binaries with entries that are plain, or compressed by zstd or LZ4 (whose libraries are opened when wanted).
// Layouts: ZLUDA's cuda_types (NOTICE). PTX is not read.
#include "image.h"

#include <dlfcn.h>
#include <elf.h>
#include <string.h>

#include <cstdint>
#include <vector>

namespace {

// A fat binary and its entries, as far as they are needed.
struct Wrapper {
  uint32_t magic, version;
  const char* data;
};
struct FatHeader {
  uint32_t magic;
  uint16_t version, size;
  uint64_t entries_size;
};
struct FatEntry {
  uint16_t kind, version;
  uint32_t header_size;
  uint64_t size;
  uint32_t compressed_size, unknown[2], architecture, bits, unknown_2;
  uint64_t flags, unknown_3, whole_size;
};
constexpr uint32_t kWrapper = 0x466243b1, kFat = 0xba55ed50;
constexpr uint16_t kElf = 2;
constexpr uint64_t kLz4 = 0x2000, kZstd = 0x8000;

template <class F>
F* symbol(const char* library, const char* name) {
  void* const loaded = dlopen(library, RTLD_LAZY);
  return loaded == nullptr ? nullptr : reinterpret_cast<F*>(dlsym(loaded, name));
}

// Empty if it cannot be unpacked.
std::vector<char> unpacked(const FatEntry& entry) {
  const char* data = reinterpret_cast<const char*>(&entry) + entry.header_size;
  if ((entry.flags & (kLz4 | kZstd)) == 0) return {data, data + entry.size};
  std::vector<char> whole(entry.whole_size);
  if ((entry.flags & kZstd) != 0) {
    static auto* const zstd = symbol<size_t(void*, size_t, const void*, size_t)>("libzstd.so.1", "ZSTD_decompress");
    if (zstd == nullptr || zstd(whole.data(), whole.size(), data, entry.compressed_size) > whole.size()) return {};
  } else {
    static auto* const lz4 = symbol<int(const char*, char*, int, int)>("liblz4.so.1", "LZ4_decompress_safe");
    const auto from = static_cast<int>(entry.compressed_size), to = static_cast<int>(whole.size());
    if (lz4 == nullptr || lz4(data, whole.data(), from, to) < 0) return {};
  }
  return whole;
}

size_t size_in_elf(const char* elf, const char* name) {
  const auto* header = reinterpret_cast<const Elf64_Ehdr*>(elf);
  const auto* sections = reinterpret_cast<const Elf64_Shdr*>(elf + header->e_shoff);
  for (int i = 0; i < header->e_shnum; ++i) {
    if (sections[i].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const Elf64_Sym*>(elf + sections[i].sh_offset);
    const char* names = elf + sections[sections[i].sh_link].sh_offset;
    for (size_t s = 0; s < sections[i].sh_size / sizeof *symbols; ++s) {
      if (strcmp(names + symbols[s].st_name, name) == 0) return symbols[s].st_size;
    }
  }
  return 0;
}

}  // namespace

namespace played {

size_t variable_size(const void* image, const char* name) {
  const char* data = static_cast<const char*>(image);
  if (data == nullptr) return 0;
  if (memcmp(data, ELFMAG, SELFMAG) == 0) return size_in_elf(data, name);
  if (reinterpret_cast<const Wrapper*>(data)->magic == kWrapper) data = reinterpret_cast<const Wrapper*>(data)->data;
  const auto* header = reinterpret_cast<const FatHeader*>(data);
  if (header->magic != kFat) return 0;
  const char *at = data + header->size, *end = at + header->entries_size;
  for (int pass = 0; pass < 2; ++pass) {  // the device's own architecture first
    for (const char* entry_at = at; entry_at < end;) {
      const auto& entry = *reinterpret_cast<const FatEntry*>(entry_at);
      entry_at += entry.header_size + entry.size;
      if (entry.kind != kElf || (entry.architecture == 90) != (pass == 0)) continue;
      const std::vector<char> elf = unpacked(entry);
      if (elf.size() < sizeof(Elf64_Ehdr) || memcmp(elf.data(), ELFMAG, SELFMAG) != 0) continue;
      if (const size_t size = size_in_elf(elf.data(), name)) return size;
    }
  }
  return 0;
}

}  // namespace played
