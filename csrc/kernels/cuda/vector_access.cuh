// Eight values at a time between memory and registers, as float32: 16-byte accesses where the addresses allow it, one
// value after the other where they do not. The same values either way.
#pragma once
#include <cstdint>

#include "common/bfloat16.h"

namespace nemo_rl::kernels {

constexpr int kEight = 8;

/// Whether rows that begin at `data`, `stride` elements apart, may be read by load8 in whole vectors.
template <class T>
inline bool vectorizable(const T* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
}

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bfloat16 x) { return static_cast<float>(x); }
__device__ __forceinline__ double widen(double x) { return x; }

__device__ __forceinline__ void load_vector(const float* p, float (&v)[kEight]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void load_vector(const bfloat16* p, float (&v)[kEight]) {
  const uint4 a = *reinterpret_cast<const uint4*>(p);
  const std::uint32_t words[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = __uint_as_float(words[i] << 16);
    v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ void store_vector(float* p, const float (&v)[kEight]) {
  reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
__device__ __forceinline__ void store_vector(bfloat16* p, const float (&v)[kEight]) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    words[i] = static_cast<std::uint32_t>(bfloat16(v[2 * i]).bits) |
               static_cast<std::uint32_t>(bfloat16(v[2 * i + 1]).bits) << 16;
  *reinterpret_cast<uint4*>(p) = make_uint4(words[0], words[1], words[2], words[3]);
}

/// The first `count` values at p, at most eight; zeros behind them. `vectors`: p is a multiple of 16 bytes.
template <class T>
__device__ __forceinline__ void load8(const T* p, std::int64_t count, bool vectors, float (&v)[kEight]) {
  if (vectors && count >= kEight) return load_vector(p, v);
#pragma unroll
  for (int i = 0; i < kEight; ++i) v[i] = i < count ? widen(p[i]) : 0.0f;
}

template <class T>
__device__ __forceinline__ void store8(T* p, std::int64_t count, bool vectors, const float (&v)[kEight]) {
  if (vectors && count >= kEight) return store_vector(p, v);
#pragma unroll
  for (int i = 0; i < kEight; ++i)
    if (i < count) p[i] = static_cast<T>(v[i]);
}

/// Blocks for `items` threads' work, within what a grid takes; kernels go on in strides of the grid.
inline unsigned grid_for(std::int64_t items, int threads) {
  const std::int64_t blocks = (items + threads - 1) / threads;
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks > 65535 * 16 ? 65535 * 16 : blocks));
}

}  // namespace nemo_rl::kernels
