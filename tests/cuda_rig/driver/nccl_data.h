// What collectives do to data: sizes of NCCL's types, sums, and reads from other processes.
#pragma once

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "settings.h"

namespace played {

// ncclDataType_t and ncclRedOp_t, as far as they are named here.
enum : int { kNcclFloat = 7, kNcclDouble = 8, kNcclBfloat16 = 9, kNcclProd = 1, kNcclMax = 2, kNcclMin = 3, kNcclAvg = 4 };

inline size_t size_of_type(int type) {
  static constexpr size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < 12 ? kSizes[type] : 1;
}

// Of a rank's memory, which may be a played device's: all of it is the host's.
inline void read_from(int pid, void* to, uint64_t from, size_t size) {
  if (pid == getpid()) {
    memmove(to, reinterpret_cast<const void*>(from), size);
    return;
  }
  for (size_t done = 0; done < size;) {
    const iovec here{static_cast<char*>(to) + done, size - done}, there{reinterpret_cast<void*>(from + done), size - done};
    const ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (got <= 0) {
      trace(1, "cannot read from process %d", pid);
      return;
    }
    done += static_cast<size_t>(got);
  }
}

// A bfloat16 that adds and divides as a float does, rounded to even.
struct Bfloat16 {
  uint16_t bits;
  explicit Bfloat16(float value) {
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = static_cast<uint16_t>((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
  }
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
  }
};

template <class T>
void combine_as(char* sum, const char* other, size_t count, int op) {
  auto* to = reinterpret_cast<T*>(sum);
  const auto* from = reinterpret_cast<const T*>(other);
  for (size_t i = 0; i < count; ++i) {
    switch (op) {
      case kNcclProd: to[i] = static_cast<T>(to[i] * from[i]); break;
      case kNcclMax: to[i] = from[i] > to[i] ? from[i] : to[i]; break;
      case kNcclMin: to[i] = from[i] < to[i] ? from[i] : to[i]; break;
      default: to[i] = static_cast<T>(to[i] + from[i]); break;
    }
  }
}

// Half precision and fp8 are not added: the first rank's stay.
inline void combine(char* sum, const char* other, size_t count, int type, int op) {
  switch (type) {
    case 0: return combine_as<int8_t>(sum, other, count, op);
    case 1: return combine_as<uint8_t>(sum, other, count, op);
    case 2: return combine_as<int32_t>(sum, other, count, op);
    case 3: return combine_as<uint32_t>(sum, other, count, op);
    case 4: return combine_as<int64_t>(sum, other, count, op);
    case 5: return combine_as<uint64_t>(sum, other, count, op);
    case kNcclFloat: return combine_as<float>(sum, other, count, op);
    case kNcclDouble: return combine_as<double>(sum, other, count, op);
    case kNcclBfloat16: return combine_as<Bfloat16>(sum, other, count, op);
    default: return;
  }
}

template <class T>
void divide_as(char* sum, size_t count, int by) {
  for (size_t i = 0; i < count; ++i) reinterpret_cast<T*>(sum)[i] = static_cast<T>(reinterpret_cast<T*>(sum)[i] / static_cast<float>(by));
}

inline void divide(char* sum, size_t count, int type, int by) {
  if (type == kNcclFloat) divide_as<float>(sum, count, by);
  if (type == kNcclDouble) divide_as<double>(sum, count, by);
  if (type == kNcclBfloat16) divide_as<Bfloat16>(sum, count, by);
}

}  // namespace played
