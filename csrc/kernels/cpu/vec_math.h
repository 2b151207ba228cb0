// Sixteen floats and their elementary functions, for files of kernels/cpu/ only. Written with GCC/Clang vector
// extensions at the machine's own width and without multiply-add, so that every CPU capability gives the same bits.
#pragma once
#ifndef NRL_CAPABILITY
#error "vec_math.h belongs to csrc/kernels/cpu/*.cpp, which are compiled once for every CPU capability"
#endif
#include <cstdint>
#include <cstring>

#include "common/bfloat16.h"
#include "kernels/cpu/native_vector.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

// GCC takes vectors wider than the machine's apart lane by lane, so sixteen lanes are made of native parts here.
inline constexpr std::int64_t kLanes = 16;
inline constexpr int kNativeLanes = kNativeBytes / 4;
inline constexpr int kParts = 64 / kNativeBytes;
using NativeInts = NativeVector<float>::Bits;

struct f32x16 {
  NativeFloats part[kParts];
};

#define NRL_VEC_INLINE static inline __attribute__((always_inline))

NRL_VEC_INLINE f32x16 load16(const float* p) {
  f32x16 v;
  for (int i = 0; i < kParts; ++i) std::memcpy(&v.part[i], p + i * kNativeLanes, kNativeBytes);
  return v;
}

NRL_VEC_INLINE void store16(float* p, f32x16 v) {
  for (int i = 0; i < kParts; ++i) std::memcpy(p + i * kNativeLanes, &v.part[i], kNativeBytes);
}

NRL_VEC_INLINE f32x16 load16(const bfloat16* p) {
  f32x16 v;
  for (int i = 0; i < kParts; ++i) {
    NativeHalves half;
    std::memcpy(&half, p + i * kNativeLanes, sizeof(half));
    v.part[i] = widen(half);
  }
  return v;
}

NRL_VEC_INLINE void store16(bfloat16* p, f32x16 v) {
  for (int i = 0; i < kParts; ++i) {
    const NativeHalves half = narrow(v.part[i]);
    std::memcpy(static_cast<void*>(p + i * kNativeLanes), &half, sizeof(half));
  }
}

NRL_VEC_INLINE f32x16 broadcast16(float value) {
  f32x16 v;
  for (auto& part : v.part) part = NativeFloats{} + value;
  return v;
}

/// The first n < 16 floats at p; the other lanes hold `fill`.
NRL_VEC_INLINE f32x16 load16_partial(const float* p, std::int64_t n, float fill) {
  float lanes[kLanes];
  for (std::int64_t i = 0; i < kLanes; ++i) lanes[i] = i < n ? p[i] : fill;
  return load16(lanes);
}

#define NRL_VEC_OPERATOR(op)                                             \
  NRL_VEC_INLINE f32x16 operator op(f32x16 a, f32x16 b) {                \
    for (int i = 0; i < kParts; ++i) a.part[i] = a.part[i] op b.part[i]; \
    return a;                                                            \
  }                                                                      \
  NRL_VEC_INLINE f32x16 operator op(f32x16 a, float b) {                 \
    for (int i = 0; i < kParts; ++i) a.part[i] = a.part[i] op b;         \
    return a;                                                            \
  }                                                                      \
  NRL_VEC_INLINE f32x16 operator op(float a, f32x16 b) {                 \
    for (int i = 0; i < kParts; ++i) b.part[i] = a op b.part[i];         \
    return b;                                                            \
  }
NRL_VEC_OPERATOR(+)
NRL_VEC_OPERATOR(-)
NRL_VEC_OPERATOR(*)
NRL_VEC_OPERATOR(/)
#undef NRL_VEC_OPERATOR

NRL_VEC_INLINE f32x16& operator+=(f32x16& a, f32x16 b) { return a = a + b; }

/// Lane-wise maximum; where a lane of `a` is NaN, that of `b`.
NRL_VEC_INLINE f32x16 max16(f32x16 a, f32x16 b) {
  for (int i = 0; i < kParts; ++i) a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
  return a;
}

/// Lane-wise minimum; where a lane of `a` is NaN, that of `b`.
NRL_VEC_INLINE f32x16 min16(f32x16 a, f32x16 b) {
  for (int i = 0; i < kParts; ++i) a.part[i] = a.part[i] < b.part[i] ? a.part[i] : b.part[i];
  return a;
}

/// Lane-wise `a >= b ? value : 0`.
NRL_VEC_INLINE f32x16 where_at_least16(f32x16 a, f32x16 b, f32x16 value) {
  for (int i = 0; i < kParts; ++i) value.part[i] = a.part[i] >= b.part[i] ? value.part[i] : NativeFloats{};
  return value;
}

/// Sum of the lanes as a fixed tree: lane i with i + 8, then + 4, + 2, + 1.
NRL_VEC_INLINE float sum_lanes(f32x16 v) {
  float lanes[kLanes];
  store16(lanes, v);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

NRL_VEC_INLINE float max_lanes(f32x16 v) {
  float lanes[kLanes];
  store16(lanes, v);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  }
  return lanes[0];
}

NRL_VEC_INLINE NativeFloats exp_native(NativeFloats x) {
  const NativeFloats high = NativeFloats{} + 89.0f, low = NativeFloats{} - 87.33654f;
  NativeFloats clamped = x < low ? low : x;  // a NaN fails both comparisons and stays
  clamped = clamped > high ? high : clamped;
  // n = round(x / ln 2) by adding 1.5 * 2^23: the low mantissa bits of the sum hold n
  const NativeFloats magic = NativeFloats{} + 12582912.0f;
  const NativeFloats shifted = clamped * 1.44269504088896341f + magic;
  const NativeFloats n = shifted - magic;
  // ln 2 in two parts; the first has 9 bits, so that n times it is exact
  const NativeFloats r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  NativeFloats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * (r * r) + r) + 1.0f;
  // 2^n in two factors: 2^128 and 2^-126 would not fit one exponent field
  NativeInts exponent;
  std::memcpy(&exponent, &shifted, sizeof(exponent));
  exponent -= 0x4B400000;
  const NativeInts half = exponent >> 1;
  const NativeInts first_bits = (half + 127) << 23, second_bits = (exponent - half + 127) << 23;
  NativeFloats first, second;
  std::memcpy(&first, &first_bits, sizeof(first));
  std::memcpy(&second, &second_bits, sizeof(second));
  return x < low ? NativeFloats{} : (p * first) * second;
}

/// exp(x) to 2 ulp. NaN stays NaN, exp(+inf) = inf, exp(-inf) = 0; a result below FLT_MIN is 0, since subnormal
/// numbers cost hundreds of cycles on some machines and no sum of ours can see them.
NRL_VEC_INLINE f32x16 exp16(f32x16 x) {
  for (auto& part : x.part) part = exp_native(part);
  return x;
}

/// 1 / (1 + exp(-x)).
NRL_VEC_INLINE f32x16 sigmoid16(f32x16 x) { return 1.0f / (1.0f + exp16(0.0f - x)); }

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
