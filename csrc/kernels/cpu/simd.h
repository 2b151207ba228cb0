// The few vector operations that the kernels need, once a capability. F32 and F64 have the same members, so a kernel
// is a template over them; load() also widens bfloat16 to float32 exactly.
#pragma once
#include <cstdint>
#include <cstring>

#include "common/bfloat16.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

#if defined(__AVX512F__)

struct F32 {
  using Scalar = float;
  using V = __m512;
  static constexpr int kLanes = 16;
  static V zero() { return _mm512_setzero_ps(); }
  static V set1(float x) { return _mm512_set1_ps(x); }
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static V load(const bfloat16* p) {
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
  }
  static V load(const float* p, int n) { return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p); }
  static V load(const bfloat16* p, int n) {
    const __m256i raw = _mm256_maskz_loadu_epi16(static_cast<__mmask16>((1u << n) - 1), p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
  }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
};

struct F64 {
  using Scalar = double;
  using V = __m512d;
  static constexpr int kLanes = 8;
  static V zero() { return _mm512_setzero_pd(); }
  static V set1(double x) { return _mm512_set1_pd(x); }
  static V load(const double* p) { return _mm512_loadu_pd(p); }
  static V load(const double* p, int n) { return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << n) - 1), p); }
  static void store(double* p, V v) { _mm512_storeu_pd(p, v); }
  static V add(V a, V b) { return _mm512_add_pd(a, b); }
  static V mul(V a, V b) { return _mm512_mul_pd(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_pd(a, b, c); }
};

#elif defined(__AVX2__)

struct F32 {
  using Scalar = float;
  using V = __m256;
  static constexpr int kLanes = 8;
  static V zero() { return _mm256_setzero_ps(); }
  static V set1(float x) { return _mm256_set1_ps(x); }
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static V load(const bfloat16* p) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
  }
  template <class T>
  static V load(const T* p, int n) {
    T full[kLanes] = {};
    std::memcpy(full, p, sizeof(T) * n);
    return load(full);
  }
  static void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
};

struct F64 {
  using Scalar = double;
  using V = __m256d;
  static constexpr int kLanes = 4;
  static V zero() { return _mm256_setzero_pd(); }
  static V set1(double x) { return _mm256_set1_pd(x); }
  static V load(const double* p) { return _mm256_loadu_pd(p); }
  static V load(const double* p, int n) {
    double full[kLanes] = {};
    std::memcpy(full, p, sizeof(double) * n);
    return load(full);
  }
  static void store(double* p, V v) { _mm256_storeu_pd(p, v); }
  static V add(V a, V b) { return _mm256_add_pd(a, b); }
  static V mul(V a, V b) { return _mm256_mul_pd(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_pd(a, b, c); }
};

#else

/// Portable: fixed-length loops that any compiler turns into its own vectors.
template <class S, int L>
struct Portable {
  using Scalar = S;
  struct V {
    S x[L];
  };
  static constexpr int kLanes = L;
  /// In one rounding where the processor has the instruction (AArch64), in two where it has not.
  static S multiply_add(S a, S b, S c) {
#if defined(__aarch64__)
    if constexpr (sizeof(S) == 4) return __builtin_fmaf(a, b, c);
    return __builtin_fma(a, b, c);
#else
    return c + a * b;
#endif
  }
  static V zero() { return V{}; }
  static V set1(S s) {
    V v;
    for (int i = 0; i < L; ++i) v.x[i] = s;
    return v;
  }
  template <class T>
  static V load(const T* p) {
    return load(p, L);
  }
  template <class T>
  static V load(const T* p, int n) {
    V v{};
    for (int i = 0; i < n; ++i) v.x[i] = static_cast<S>(p[i]);
    return v;
  }
  static void store(S* p, V v) { std::memcpy(p, v.x, sizeof(v.x)); }
  static V add(V a, V b) {
    for (int i = 0; i < L; ++i) a.x[i] += b.x[i];
    return a;
  }
  static V mul(V a, V b) {
    for (int i = 0; i < L; ++i) a.x[i] *= b.x[i];
    return a;
  }
  static V fma(V a, V b, V c) {
    for (int i = 0; i < L; ++i) c.x[i] = multiply_add(a.x[i], b.x[i], c.x[i]);
    return c;
  }
};
struct F32 : Portable<float, 8> {};
struct F64 : Portable<double, 4> {};

#endif

template <class T>
struct simd_of {
  using type = F32;
};
template <>
struct simd_of<double> {
  using type = F64;
};
/// The vector type in which values of type T are computed: F32 for float and bfloat16, F64 for double.
template <class T>
using simd_t = typename simd_of<T>::type;

/// Sum of the lanes by halving: lane i with lane i + L/2, then i + L/4, ... The order is fixed.
template <class S>
inline typename S::Scalar reduce_add(typename S::V v) {
  typename S::Scalar lanes[S::kLanes];
  S::store(lanes, v);
  for (int half = S::kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
