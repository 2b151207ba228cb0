// The machine's own vectors, as GCC vector extensions: what pack.h, vec_math.h and attention_simd.h are made of.
#pragma once
#ifndef NRL_CAPABILITY
#error "native_vector.h belongs to csrc/kernels/cpu/*.cpp, which are compiled once for every CPU capability"
#endif
#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace nemo_rl::kernels {
namespace {  // nothing here may be shared between capabilities

#if defined(__AVX512F__)
inline constexpr int kNativeBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kNativeBytes = 32;
#else
inline constexpr int kNativeBytes = 16;
#endif

template <class T>
struct NativeVector;
template <>
struct NativeVector<float> {
  using Values = float __attribute__((vector_size(kNativeBytes)));
  using Bits = std::int32_t __attribute__((vector_size(kNativeBytes)));
};
template <>
struct NativeVector<double> {
  using Values = double __attribute__((vector_size(kNativeBytes)));
  using Bits = std::int64_t __attribute__((vector_size(kNativeBytes)));
};
using NativeFloats = NativeVector<float>::Values;
using NativeDoubles = NativeVector<double>::Values;

using NativeUnsigned = std::uint32_t __attribute__((vector_size(kNativeBytes)));
using NativeHalves = std::uint16_t __attribute__((vector_size(kNativeBytes / 2)));

/// The elements `at` of a followed by b. Mask: the integer vector of the same lanes.
template <class Mask, int... at, class Vec>
[[gnu::always_inline]] inline Vec shuffled(Vec a, Vec b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, at...);
#else  // GCC has that from version 12 on
  return __builtin_shuffle(a, b, Mask{at...});
#endif
}

/// bfloat16 storage, the upper half of a float, to floats and back. narrow rounds to nearest even and keeps a NaN a
/// NaN, as bfloat16's constructor does.
[[gnu::always_inline]] inline NativeFloats widen(NativeHalves x) {
  return reinterpret_cast<NativeFloats>(__builtin_convertvector(x, NativeUnsigned) << 16);
}
[[gnu::always_inline]] inline NativeHalves narrow(NativeFloats x) {
  const auto bits = reinterpret_cast<NativeUnsigned>(x);
  const NativeUnsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = (bits >> 16) | 0x40u;
  return __builtin_convertvector(x == x ? rounded : nan, NativeHalves);
}

/// a * b + c: fused where the processor has it, two roundings in the base build of x86.
[[gnu::always_inline]] inline NativeFloats fma(NativeFloats a, NativeFloats b, NativeFloats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return reinterpret_cast<NativeFloats>(
      vfmaq_f32(reinterpret_cast<float32x4_t>(c), reinterpret_cast<float32x4_t>(a), reinterpret_cast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}
[[gnu::always_inline]] inline NativeDoubles fma(NativeDoubles a, NativeDoubles b, NativeDoubles c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, c);
#elif defined(__aarch64__)
  return reinterpret_cast<NativeDoubles>(
      vfmaq_f64(reinterpret_cast<float64x2_t>(c), reinterpret_cast<float64x2_t>(a), reinterpret_cast<float64x2_t>(b)));
#else
  return a * b + c;
#endif
}

}  // namespace
}  // namespace nemo_rl::kernels
