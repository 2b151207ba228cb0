// The machine's own vectors: the lower half of the vector layer (kernels/cpu/vec.h is the upper). A Register<T> is one
// register of numbers, as GCC and Clang spell it (vector extensions); intrinsics stand only where they have no
// spelling. Kernels whose shape is counted in registers use it directly (attention, transpositions); all others use
// Vec.
//
//   load, store          whole registers of float, double, bfloat16 (widened exactly; rounded to nearest even)
//   load(p, n)           the first n lanes, zeros after them; store(p, v, n) the first n lanes
//   fma                  a * b + c, in one rounding where the processor has it
//   sum_ascending, largest_of  over the lanes
//   exp2_of              2^x
#pragma once
#ifndef NRL_CAPABILITY
#error "the vector layer belongs to csrc/kernels/cpu/*.cpp, which are compiled once for every CPU capability"
#endif
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "common/bfloat16.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // false alarm inside GCC 12's own _mm512_reduce_max_ps
#endif

/// Of everything in the vector layer: inlined always, so that no value of it lies in memory between two calls.
#if defined(NRL_SANITIZED)  // as NRL_INLINE
#define NRL_VEC inline
#else
#define NRL_VEC [[gnu::always_inline]] inline
#endif

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

#if defined(__AVX512F__)
inline constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kRegisterBytes = 32;
#else
inline constexpr int kRegisterBytes = 16;
#endif

template <class T>
struct RegisterOf;
template <>
struct RegisterOf<float> {
  using Values = float __attribute__((vector_size(kRegisterBytes)));
  using Bits = std::int32_t __attribute__((vector_size(kRegisterBytes)));
  typedef float Unaligned __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
};
template <>
struct RegisterOf<double> {
  using Values = double __attribute__((vector_size(kRegisterBytes)));
  using Bits = std::int64_t __attribute__((vector_size(kRegisterBytes)));
  typedef double Unaligned __attribute__((vector_size(kRegisterBytes), aligned(8), may_alias));
};
/// The registers of 32-bit words that hold pairs of bfloat16, or bits.
template <>
struct RegisterOf<std::uint32_t> {
  using Values = std::uint32_t __attribute__((vector_size(kRegisterBytes)));
  typedef std::uint32_t Unaligned __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
};
template <class T>
using Register = typename RegisterOf<T>::Values;
/// The integers of the same lanes: what a comparison gives.
template <class T>
using RegisterBits = typename RegisterOf<T>::Bits;
template <class T>
inline constexpr int kRegisterLanes = kRegisterBytes / static_cast<int>(sizeof(T));

/// As many bfloat16 as a register has floats.
using RegisterHalves = std::uint16_t __attribute__((vector_size(kRegisterBytes / 2)));
typedef std::uint16_t UnalignedHalves __attribute__((vector_size(kRegisterBytes / 2), aligned(2), may_alias));

// ---------------------------------------------------------------- values

/// x in every lane, with its bits.
#if defined(__AVX512F__)
NRL_VEC Register<float> splat(float x) { return _mm512_set1_ps(x); }
NRL_VEC Register<double> splat(double x) { return _mm512_set1_pd(x); }
#elif defined(__AVX2__)
NRL_VEC Register<float> splat(float x) { return _mm256_set1_ps(x); }
NRL_VEC Register<double> splat(double x) { return _mm256_set1_pd(x); }
#else
NRL_VEC Register<float> splat(float x) { return Register<float>{x, x, x, x}; }
NRL_VEC Register<double> splat(double x) { return Register<double>{x, x}; }
#endif
NRL_VEC Register<std::uint32_t> splat(std::uint32_t x) { return x - Register<std::uint32_t>{}; }

/// bfloat16 storage, the upper half of a float, to floats and back. narrow rounds to nearest even and keeps a NaN a
/// NaN, as bfloat16's constructor does.
NRL_VEC Register<float> widen(RegisterHalves x) {
  return reinterpret_cast<Register<float>>(__builtin_convertvector(x, Register<std::uint32_t>) << 16);
}
NRL_VEC RegisterHalves narrow(Register<float> x) {
  const auto bits = reinterpret_cast<Register<std::uint32_t>>(x);
  const Register<std::uint32_t> rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(x == x ? rounded : nan, RegisterHalves);
}

NRL_VEC Register<float> load(const float* p) { return *reinterpret_cast<const RegisterOf<float>::Unaligned*>(p); }
NRL_VEC Register<double> load(const double* p) { return *reinterpret_cast<const RegisterOf<double>::Unaligned*>(p); }
NRL_VEC Register<float> load(const bfloat16* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
#else
  return widen(*reinterpret_cast<const UnalignedHalves*>(p));
#endif
}
NRL_VEC Register<std::uint32_t> load(const std::uint32_t* p) {
  return *reinterpret_cast<const RegisterOf<std::uint32_t>::Unaligned*>(p);
}

NRL_VEC void store(float* p, Register<float> v) { *reinterpret_cast<RegisterOf<float>::Unaligned*>(p) = v; }
NRL_VEC void store(double* p, Register<double> v) { *reinterpret_cast<RegisterOf<double>::Unaligned*>(p) = v; }
NRL_VEC void store(bfloat16* p, Register<float> v) { *reinterpret_cast<UnalignedHalves*>(p) = narrow(v); }
NRL_VEC void store(std::uint32_t* p, Register<std::uint32_t> v) {
  *reinterpret_cast<RegisterOf<std::uint32_t>::Unaligned*>(p) = v;
}

/// A register of doubles from as many floats or doubles, and back.
NRL_VEC Register<double> load_doubles(const float* p) {
#if defined(__AVX512F__)
  return reinterpret_cast<Register<double>>(_mm512_cvtps_pd(_mm256_loadu_ps(p)));  // the compiler takes it apart
#else
  typedef float Half __attribute__((vector_size(kRegisterBytes / 2), aligned(4), may_alias));
  return __builtin_convertvector(*reinterpret_cast<const Half*>(p), Register<double>);
#endif
}
NRL_VEC Register<double> load_doubles(const double* p) { return load(p); }
NRL_VEC void store_doubles(float* p, Register<double> v) {
  typedef float Half __attribute__((vector_size(kRegisterBytes / 2), aligned(4), may_alias));
  *reinterpret_cast<Half*>(p) = __builtin_convertvector(v, Half);
}
NRL_VEC void store_doubles(double* p, Register<double> v) { store(p, v); }

// ---------------------------------------------------------------- tails

#if defined(__AVX512F__)
/// The first n lanes, n at most their number.
NRL_VEC unsigned first_lanes(int n) { return (1u << n) - 1; }
NRL_VEC Register<float> load(const float* p, int n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>(first_lanes(n)), p);
}
NRL_VEC Register<double> load(const double* p, int n) {
  return _mm512_maskz_loadu_pd(static_cast<__mmask8>(first_lanes(n)), p);
}
NRL_VEC Register<std::uint32_t> load(const std::uint32_t* p, int n) {
  return reinterpret_cast<Register<std::uint32_t>>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>(first_lanes(n)), p));
}
NRL_VEC Register<float> load(const bfloat16* p, int n) {
  return widen(reinterpret_cast<RegisterHalves>(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(first_lanes(n)), p)));
}
NRL_VEC void store(float* p, Register<float> v, int n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>(first_lanes(n)), v);
}
NRL_VEC void store(double* p, Register<double> v, int n) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>(first_lanes(n)), v);
}
NRL_VEC void store(bfloat16* p, Register<float> v, int n) {
  _mm256_mask_storeu_epi16(p, static_cast<__mmask16>(first_lanes(n)), reinterpret_cast<__m256i>(narrow(v)));
}
#else
template <class E>
NRL_VEC auto load(const E* p, int n) {
  E lanes[kRegisterBytes / sizeof(float)] = {};
  std::memcpy(static_cast<void*>(lanes), p, static_cast<std::size_t>(n) * sizeof(E));
  return load(lanes);
}
template <class E, class V>
NRL_VEC void store(E* p, V v, int n) {
  E lanes[kRegisterBytes / sizeof(float)];
  store(lanes, v);
  std::memcpy(static_cast<void*>(p), lanes, static_cast<std::size_t>(n) * sizeof(E));
}
#endif

// ---------------------------------------------------------------- arithmetic

/// a * b + c: fused where the processor has it, two roundings in the base build of x86.
NRL_VEC Register<float> fma(Register<float> a, Register<float> b, Register<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return reinterpret_cast<Register<float>>(
      vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a), reinterpret_cast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}
NRL_VEC Register<double> fma(Register<double> a, Register<double> b, Register<double> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, c);
#elif defined(__aarch64__)
  return reinterpret_cast<Register<double>>(
      vfmaq_f64(reinterpret_cast<float64x2_t>(c), reinterpret_cast<float64x2_t>(a), reinterpret_cast<float64x2_t>(b)));
#else
  return a * b + c;
#endif
}

/// Lane by lane the larger; where a lane of `a` is NaN, that of b.
template <class V>
NRL_VEC V max_of(V a, V b) {
  return a > b ? a : b;
}
template <class V>
NRL_VEC V min_of(V a, V b) {
  return a < b ? a : b;
}

/// The largest lane.
NRL_VEC float largest_of(Register<float> v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(v);
#else
  float best = v[0];
  for (int i = 1; i < kRegisterLanes<float>; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}
NRL_VEC double largest_of(Register<double> v) {
  double best = v[0];
  for (int i = 1; i < kRegisterLanes<double>; ++i) best = v[i] > best ? v[i] : best;
  return best;
}

/// The sum of the lanes in ascending order.
template <class V>
NRL_VEC auto sum_ascending(V v) {
  auto total = v[0];
  for (unsigned i = 1; i < sizeof(v) / sizeof(v[0]); ++i) total += v[i];
  return total;
}

/// 2^x for x <= 127: relative error below 1e-7, exactly 1 at 0, 0 below -126 (and at -inf), NaN stays NaN.
NRL_VEC Register<float> exp2_of(Register<float> x) {
  const auto lowest = splat(-126.0f);
  const Register<float> clamped = x < lowest ? lowest : x;
  const auto magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves round(x) in the low mantissa bits
  const Register<float> shifted = clamped + magic;
  const Register<float> f = clamped - (shifted - magic);  // [-0.5, 0.5]
  auto p = splat(1.53533618e-04f);                        // minimax of 2^f with p(0) = 1
  p = fma(p, f, splat(1.33988744e-03f));
  p = fma(p, f, splat(9.61843736e-03f));
  p = fma(p, f, splat(5.55033247e-02f));
  p = fma(p, f, splat(2.40226479e-01f));
  p = fma(p, f, splat(6.93147203e-01f));
  p = fma(p, f, splat(1.0f));
  const auto exponent = (reinterpret_cast<RegisterBits<float>>(shifted) << 23) + (127 << 23);
  const Register<float> result = p * reinterpret_cast<Register<float>>(exponent);
  return x < lowest ? Register<float>{} : result;
}
NRL_VEC Register<double> exp2_of(Register<double> x) {
  for (int i = 0; i < kRegisterLanes<double>; ++i) x[i] = std::exp2(x[i]);
  return x;
}
NRL_VEC float exp2_of(float x) { return exp2_of(splat(x))[0]; }
NRL_VEC double exp2_of(double x) { return std::exp2(x); }

/// tanh(x), by powers of two.
template <class T>
NRL_VEC Register<T> tanh_of_register(Register<T> x) {
  const Register<T> size = x < Register<T>{} ? -x : x, e = exp2_of(size * splat(T(-2.88539008177792681472)));
  const Register<T> t = (splat(T(1)) - e) / (splat(T(1)) + e);
  return x < Register<T>{} ? -t : t;
}
NRL_VEC Register<float> tanh_of(Register<float> x) { return tanh_of_register<float>(x); }
NRL_VEC Register<double> tanh_of(Register<double> x) { return tanh_of_register<double>(x); }

// ---------------------------------------------------------------- shuffles

/// The elements `at` of a followed by b. Mask: the integer vector of the same lanes.
template <class Mask, int... at, class V>
NRL_VEC V shuffled(V a, V b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, at...);
#else  // GCC has that from version 12 on
  return __builtin_shuffle(a, b, Mask{at...});
#endif
}

template <class V, class Mask, std::size_t... I>
NRL_VEC V interleave_low(V a, V b, std::index_sequence<I...>) {
  constexpr auto width = sizeof...(I);
  return shuffled<Mask, static_cast<int>(I % 2 ? width + I / 2 : I / 2)...>(a, b);
}
template <class V, class Mask, std::size_t... I>
NRL_VEC V interleave_high(V a, V b, std::index_sequence<I...>) {
  constexpr auto width = sizeof...(I);
  return shuffled<Mask, static_cast<int>((I % 2 ? width + I / 2 : I / 2) + width / 2)...>(a, b);
}

/// v[i][j] and v[j][i] change places: log2(width) perfect shuffles of whole registers.
template <class V, int width>
NRL_VEC void transpose(V (&v)[width]) {
  using Mask = decltype(v[0] < v[0]);
  constexpr auto lanes = std::make_index_sequence<width>{};
#pragma GCC unroll 4
  for (int stage = 1; stage < width; stage *= 2) {
    V next[width];
#pragma GCC unroll 8
    for (int i = 0; i < width / 2; ++i) {
      next[2 * i] = interleave_low<V, Mask>(v[i], v[i + width / 2], lanes);
      next[2 * i + 1] = interleave_high<V, Mask>(v[i], v[i + width / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < width; ++i) v[i] = next[i];
  }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
