// The vectors that the attention kernels are written in: GCC vector extensions, with intrinsics only where they have no
// spelling for it (multiply-add, horizontal maximum). Everything lies in the capability's own namespace.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "common/host_device.h"
#include "kernels/cpu/native_vector.h"
#include "kernels/cpu/transpose.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarm inside GCC 12's own _mm512_reduce_max_ps
#endif

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

template <class Real>
struct Simd;

template <>
struct Simd<float> {
  static constexpr int width = kNativeBytes / 4;
  using Vec = NativeFloats;
  typedef float Unaligned __attribute__((vector_size(kNativeBytes), aligned(4), may_alias));
  using Int = NativeVector<float>::Bits;
  typedef std::uint16_t Half __attribute__((vector_size(kNativeBytes / 2), aligned(2), may_alias));
};

template <>
struct Simd<double> {
  static constexpr int width = kNativeBytes / 8;
  using Vec = NativeDoubles;
  typedef double Unaligned __attribute__((vector_size(kNativeBytes), aligned(8), may_alias));
  using Int = NativeVector<double>::Bits;
};

using FloatVec = Simd<float>::Vec;
using DoubleVec = Simd<double>::Vec;

template <class Real>
NRL_INLINE_MEMBER typename Simd<Real>::Vec splat(Real x) {
  return x - typename Simd<Real>::Vec{};
}

NRL_INLINE_MEMBER FloatVec load(const float* p) { return *reinterpret_cast<const Simd<float>::Unaligned*>(p); }
NRL_INLINE_MEMBER DoubleVec load(const double* p) { return *reinterpret_cast<const Simd<double>::Unaligned*>(p); }
NRL_INLINE_MEMBER FloatVec load(const std::uint16_t* p) {
  return widen(*reinterpret_cast<const Simd<float>::Half*>(p));
}

/// The first n of a vector's lanes, zeros after them.
template <class Elem>
NRL_INLINE_MEMBER auto load_partial(const Elem* p, int n) {
  Elem lanes[kNativeBytes / sizeof(float)] = {};
  std::memcpy(lanes, p, n * sizeof(Elem));
  return load(lanes);
}

NRL_INLINE_MEMBER void store(float* p, FloatVec v) { *reinterpret_cast<Simd<float>::Unaligned*>(p) = v; }
NRL_INLINE_MEMBER void store(double* p, DoubleVec v) { *reinterpret_cast<Simd<double>::Unaligned*>(p) = v; }
NRL_INLINE_MEMBER void store(std::uint16_t* p, FloatVec v) { *reinterpret_cast<Simd<float>::Half*>(p) = narrow(v); }

template <class Elem, class Vec>
NRL_INLINE_MEMBER void store_partial(Elem* p, Vec v, int n) {
  Elem lanes[kNativeBytes / sizeof(float)];
  store(lanes, v);
  std::memcpy(p, lanes, n * sizeof(Elem));
}

NRL_INLINE_MEMBER float to_real(float x) { return x; }
NRL_INLINE_MEMBER double to_real(double x) { return x; }
NRL_INLINE_MEMBER float to_real(std::uint16_t x) {
  const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <class Vec>
NRL_INLINE_MEMBER Vec vmax(Vec a, Vec b) {
  return a > b ? a : b;
}

NRL_INLINE_MEMBER float horizontal_max(FloatVec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float best = v[0];
  for (int i = 1; i < Simd<float>::width; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}
NRL_INLINE_MEMBER double horizontal_max(DoubleVec v) {
  double best = v[0];
  for (int i = 1; i < Simd<double>::width; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

/// Lanes in ascending order.
template <class Vec>
NRL_INLINE_MEMBER auto horizontal_sum(Vec v) {
  auto total = v[0];
  for (unsigned i = 1; i < sizeof(v) / sizeof(v[0]); ++i) total += v[i];
  return total;
}

/// 2^x for x <= 127: relative error below 1e-7, exactly 1 at 0, 0 below -126 (and at -inf), NaN stays NaN.
NRL_INLINE_MEMBER FloatVec exp2_vec(FloatVec x) {
  const FloatVec lowest = splat(-126.0f);
  const FloatVec clamped = x < lowest ? lowest : x;
  const FloatVec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves round(x) in the low mantissa bits
  const FloatVec shifted = clamped + magic;
  const FloatVec f = clamped - (shifted - magic);  // [-0.5, 0.5]
  FloatVec p = splat(1.53533618e-04f);             // minimax of 2^f with p(0) = 1
  p = fma(p, f, splat(1.33988744e-03f));
  p = fma(p, f, splat(9.61843736e-03f));
  p = fma(p, f, splat(5.55033247e-02f));
  p = fma(p, f, splat(2.40226479e-01f));
  p = fma(p, f, splat(6.93147203e-01f));
  p = fma(p, f, splat(1.0f));
  const auto exponent = (reinterpret_cast<Simd<float>::Int>(shifted) << 23) + (127 << 23);
  const FloatVec result = p * reinterpret_cast<FloatVec>(exponent);
  return x < lowest ? FloatVec{} : result;
}
NRL_INLINE_MEMBER DoubleVec exp2_vec(DoubleVec x) {
  for (int i = 0; i < Simd<double>::width; ++i) x[i] = std::exp2(x[i]);
  return x;
}
NRL_INLINE_MEMBER float exp2_scalar(float x) { return exp2_vec(splat(x))[0]; }
NRL_INLINE_MEMBER double exp2_scalar(double x) { return std::exp2(x); }

/// Transposes width vectors in registers.
template <class Real>
NRL_INLINE_MEMBER void transpose(typename Simd<Real>::Vec (&v)[Simd<Real>::width]) {
  transpose_square<typename Simd<Real>::Int>(v);
}

}  // namespace
}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
