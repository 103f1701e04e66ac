// Copies and fills, in stream order. Arrays (textures) are not played.
//
// As with CUDA, what comes from pageable memory has been read when a call returns, and what goes there has arrived.
#include <string.h>

#include <algorithm>

#include "memory.h"

using namespace played;

namespace {

Ns takes(size_t bytes) { return settings().copy_ns + static_cast<Ns>(static_cast<double>(bytes) / settings().copy_gbps); }

// Not while the stream is captured: there is nothing to wait for.
CUresult wait_for_stream(CUstream handle) {
  OpRef last;
  const CUresult result = with_stream(handle, [&](CUstream stream) {
    if (stream->capture == nullptr) last = stream->last;
    return CUDA_SUCCESS;
  });
  wait_for(last);
  return result;
}

CUresult run(CUgraphNodeType type, const char* name, size_t bytes, std::function<void()> effect, CUstream stream, bool wait) {
  Work work;
  work.type = type;
  work.name = name;
  work.takes = takes(bytes);
  work.effect = std::move(effect);
  const CUresult result = put(stream, std::move(work));
  return result == CUDA_SUCCESS && wait ? wait_for_stream(stream) : result;
}

CUresult copy(void* to, const void* from, size_t bytes, CUstream stream, bool wait = false) {
  if (bytes == 0) return CUDA_SUCCESS;
  std::function<void()> effect = [to, from, bytes] { memmove(to, from, bytes); };
  if (!known(from)) {
    const char* const bytes_now = static_cast<const char*>(from);
    const auto staged = std::make_shared<std::vector<char>>(bytes_now, bytes_now + bytes);
    effect = [to, staged] { memcpy(to, staged->data(), staged->size()); };
  }
  return run(CU_GRAPH_NODE_TYPE_MEMCPY, "copy", bytes, std::move(effect), stream, wait || !known(to));
}

CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, bool wait = false) {
  return copy(host(to), host(from), bytes, stream, wait);
}

// One side of a copy of rows.
struct Side {
  char* at;
  size_t pitch, slice;
};

// Of CUDA_MEMCPY2D and 3D: the side's memory; null: an array.
char* memory_of(CUmemorytype type, const void* in_host, CUdeviceptr on_device) {
  if (type == CU_MEMORYTYPE_ARRAY) return nullptr;
  return type == CU_MEMORYTYPE_HOST ? const_cast<char*>(static_cast<const char*>(in_host)) : host(on_device);
}

CUresult copy_rows(Side to, Side from, size_t width, size_t height, size_t depth, CUstream stream, bool wait) {
  if (to.at == nullptr || from.at == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
  const auto effect = [=] {
    for (size_t z = 0; z < depth; ++z) {
      for (size_t y = 0; y < height; ++y) memmove(to.at + z * to.slice + y * to.pitch, from.at + z * from.slice + y * from.pitch, width);
    }
  };
  const bool pageable = !known(to.at) || !known(from.at);
  return run(CU_GRAPH_NODE_TYPE_MEMCPY, "copy", width * height * depth, effect, stream, wait || pageable);
}

CUresult copy_2d(const CUDA_MEMCPY2D& c, CUstream stream, bool wait) {
  Side to{memory_of(c.dstMemoryType, c.dstHost, c.dstDevice), c.dstPitch, 0};
  Side from{memory_of(c.srcMemoryType, c.srcHost, c.srcDevice), c.srcPitch, 0};
  if (to.at != nullptr) to.at += c.dstY * c.dstPitch + c.dstXInBytes;
  if (from.at != nullptr) from.at += c.srcY * c.srcPitch + c.srcXInBytes;
  return copy_rows(to, from, c.WidthInBytes, c.Height, 1, stream, wait);
}

CUresult copy_3d(const CUDA_MEMCPY3D& c, CUstream stream, bool wait) {
  Side to{memory_of(c.dstMemoryType, c.dstHost, c.dstDevice), c.dstPitch, c.dstPitch * c.dstHeight};
  Side from{memory_of(c.srcMemoryType, c.srcHost, c.srcDevice), c.srcPitch, c.srcPitch * c.srcHeight};
  if (to.at != nullptr) to.at += c.dstZ * to.slice + c.dstY * to.pitch + c.dstXInBytes;
  if (from.at != nullptr) from.at += c.srcZ * from.slice + c.srcY * from.pitch + c.srcXInBytes;
  return copy_rows(to, from, c.WidthInBytes, c.Height, c.Depth, stream, wait);
}

template <class T>
CUresult fill(CUdeviceptr at, size_t pitch, T value, size_t width, size_t height, CUstream stream) {
  const auto effect = [=] {
    for (size_t y = 0; y < height; ++y) std::fill_n(reinterpret_cast<T*>(host(at) + y * pitch), width, value);
  };
  return run(CU_GRAPH_NODE_TYPE_MEMSET, "fill", width * height * sizeof(T), effect, stream, false);
}

}  // namespace

// -- copies that wait

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return play_unsafe(__func__, [&] { return copy(to, from, bytes, nullptr, true); });
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
  return play_unsafe(__func__, [&] { return copy(host(to), from, bytes, nullptr, true); });
}

CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
  return play_unsafe(__func__, [&] { return copy(to, host(from), bytes, nullptr, true); });
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  return play_unsafe(__func__, [&] { return copy(to, from, bytes, nullptr, true); });
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes) {
  return play_unsafe(__func__, [&] { return copy(to, from, bytes, nullptr, true); });
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D* c) {
  return play_unsafe(__func__, [&] { return copy_2d(*c, nullptr, true); });
}

CUresult cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D* c) {
  return play_unsafe(__func__, [&] { return copy_2d(*c, nullptr, true); });
}

CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D* c) {
  return play_unsafe(__func__, [&] { return copy_3d(*c, nullptr, true); });
}

// -- copies in stream order

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return play(__func__, [&] { return copy(to, from, bytes, stream); });
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return play(__func__, [&] { return copy(host(to), from, bytes, stream); });
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return play(__func__, [&] { return copy(to, host(from), bytes, stream); });
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return play(__func__, [&] { return copy(to, from, bytes, stream); });
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext, CUdeviceptr from, CUcontext, size_t bytes, CUstream stream) {
  return play(__func__, [&] { return copy(to, from, bytes, stream); });
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* to, CUdeviceptr* from, size_t* bytes, size_t count, CUmemcpyAttributes*, size_t*, size_t,
                               CUstream stream) {
  return play(__func__, [&] {
    CUresult result = CUDA_SUCCESS;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; ++i) result = copy(to[i], from[i], bytes[i], stream);
    return result;
  });
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* c, CUstream stream) {
  return play(__func__, [&] { return copy_2d(*c, stream, false); });
}

CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* c, CUstream stream) {
  return play(__func__, [&] { return copy_3d(*c, stream, false); });
}

// -- fills; as with CUDA, those without a stream do not wait for their end

CUresult cuMemsetD8_v2(CUdeviceptr at, unsigned char value, size_t count) {
  return play_unsafe(__func__, [&] { return fill<uint8_t>(at, 0, value, count, 1, nullptr); });
}

CUresult cuMemsetD16_v2(CUdeviceptr at, unsigned short value, size_t count) {
  return play_unsafe(__func__, [&] { return fill<uint16_t>(at, 0, value, count, 1, nullptr); });
}

CUresult cuMemsetD32_v2(CUdeviceptr at, unsigned value, size_t count) {
  return play_unsafe(__func__, [&] { return fill<uint32_t>(at, 0, value, count, 1, nullptr); });
}

CUresult cuMemsetD2D8_v2(CUdeviceptr at, size_t pitch, unsigned char value, size_t width, size_t height) {
  return play_unsafe(__func__, [&] { return fill<uint8_t>(at, pitch, value, width, height, nullptr); });
}

CUresult cuMemsetD8Async(CUdeviceptr at, unsigned char value, size_t count, CUstream stream) {
  return play(__func__, [&] { return fill<uint8_t>(at, 0, value, count, 1, stream); });
}

CUresult cuMemsetD16Async(CUdeviceptr at, unsigned short value, size_t count, CUstream stream) {
  return play(__func__, [&] { return fill<uint16_t>(at, 0, value, count, 1, stream); });
}

CUresult cuMemsetD32Async(CUdeviceptr at, unsigned value, size_t count, CUstream stream) {
  return play(__func__, [&] { return fill<uint32_t>(at, 0, value, count, 1, stream); });
}

CUresult cuMemsetD2D8Async(CUdeviceptr at, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream) {
  return play(__func__, [&] { return fill<uint8_t>(at, pitch, value, width, height, stream); });
}
