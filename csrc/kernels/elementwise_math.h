// Branch-free elementary functions for the per-token formulas. On the CPU a compiler vectorises loops over them; on
// CUDA exp_of is the device's own.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace nemo_rl::kernels {

template <class T>
NRL_INLINE T abs_of(T x) {
  return x < T(0) ? -x : x;
}

/// NaN stays NaN, as in torch.clamp.
template <class T>
NRL_INLINE T clamp_to(T x, T lo, T hi) {
  const T low = x < lo ? lo : x;
  return low > hi ? hi : low;
}

/// False for NaN and the infinities.
template <class T>
NRL_INLINE bool is_finite(T x) {
  return x - x == T(0);
}

/// torch.nan_to_num(x, nan=0, posinf=0, neginf=0)
template <class T>
NRL_INLINE T finite_or_zero(T x) {
  return is_finite(x) ? x : T(0);
}

/// a * b + c in one instruction where the target has one; plain C++ elsewhere, never a library call.
template <class T>
NRL_INLINE T mul_add(T a, T b, T c) {
#if defined(__CUDA_ARCH__)
  return fma(a, b, c);
#elif defined(__FMA__)
  return sizeof(T) == 4
             ? static_cast<T>(__builtin_fmaf(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c)))
             : static_cast<T>(__builtin_fma(a, b, c));
#else
  return a * b + c;
#endif
}

#if defined(__CUDACC__)
NRL_INLINE float exp_of(float x) { return expf(x); }
NRL_INLINE double exp_of(double x) { return exp(x); }
#else
/// e^x within 2 units in the last place; 0 and infinity outside the range, NaN for NaN.
/// x = n ln 2 + r, a polynomial in r, and 2^n in two factors so that denormal results and overflow come out right.
NRL_INLINE float exp_of(float x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  float c = x < -104.f ? -104.f : x;
  c = c > 89.f ? 89.f : c;
  const float shifted = mul_add(c, 1.44269504088896341f, kRound);
  const float n = shifted - kRound;
  const float r = mul_add(n, 2.12194440e-4f, mul_add(n, -0.693359375f, c));
  float p = 1.9875691500e-4f;
  p = mul_add(p, r, 1.3981999507e-3f);
  p = mul_add(p, r, 8.3334519073e-3f);
  p = mul_add(p, r, 4.1665795894e-2f);
  p = mul_add(p, r, 1.6666665459e-1f);
  p = mul_add(p, r, 5.0000001201e-1f);
  p = mul_add(p, r * r, r) + 1.f;
  const std::int32_t k = static_cast<std::int32_t>(__builtin_bit_cast(std::uint32_t, shifted) - 0x4B400000u);
  const std::int32_t half = k >> 1;
  const float s1 = __builtin_bit_cast(float, static_cast<std::uint32_t>(half + 127) << 23);
  const float s2 = __builtin_bit_cast(float, static_cast<std::uint32_t>(k - half + 127) << 23);
  return p * s1 * s2;
}

NRL_INLINE double exp_of(double x) {
  constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  double c = x < -746.0 ? -746.0 : x;
  c = c > 710.0 ? 710.0 : c;
  const double shifted = mul_add(c, 1.4426950408889634074, kRound);
  const double n = shifted - kRound;
  const double r = mul_add(n, -1.42860682030941723212e-6, mul_add(n, -6.93145751953125e-1, c));
  double p = 1.0 / 6227020800.0;
  p = mul_add(p, r, 1.0 / 479001600.0);
  p = mul_add(p, r, 1.0 / 39916800.0);
  p = mul_add(p, r, 1.0 / 3628800.0);
  p = mul_add(p, r, 1.0 / 362880.0);
  p = mul_add(p, r, 1.0 / 40320.0);
  p = mul_add(p, r, 1.0 / 5040.0);
  p = mul_add(p, r, 1.0 / 720.0);
  p = mul_add(p, r, 1.0 / 120.0);
  p = mul_add(p, r, 1.0 / 24.0);
  p = mul_add(p, r, 1.0 / 6.0);
  p = mul_add(p, r, 0.5);
  p = mul_add(p, r * r, r) + 1.0;
  const std::int64_t k = static_cast<std::int64_t>(__builtin_bit_cast(std::uint64_t, shifted) - 0x4338000000000000ull);
  const std::int64_t half = k >> 1;
  const double s1 = __builtin_bit_cast(double, static_cast<std::uint64_t>(half + 1023) << 52);
  const double s2 = __builtin_bit_cast(double, static_cast<std::uint64_t>(k - half + 1023) << 52);
  return p * s1 * s2;
}
#endif

/// e^r - 1 - r, given er = e^r; a series near 0, where the direct form would lose every digit.
template <class T>
NRL_INLINE T exp_minus_linear(T r, T er) {
  T q;
  if (sizeof(T) == 4) {
    q = T(1.0 / 362880);
  } else {
    q = T(1.0 / 20922789888000.0);
    q = mul_add(q, r, T(1.0 / 1307674368000.0));
    q = mul_add(q, r, T(1.0 / 87178291200.0));
    q = mul_add(q, r, T(1.0 / 6227020800.0));
    q = mul_add(q, r, T(1.0 / 479001600.0));
    q = mul_add(q, r, T(1.0 / 39916800.0));
    q = mul_add(q, r, T(1.0 / 3628800.0));
    q = mul_add(q, r, T(1.0 / 362880.0));
  }
  q = mul_add(q, r, T(1.0 / 40320));
  q = mul_add(q, r, T(1.0 / 5040));
  q = mul_add(q, r, T(1.0 / 720));
  q = mul_add(q, r, T(1.0 / 120));
  q = mul_add(q, r, T(1.0 / 24));
  q = mul_add(q, r, T(1.0 / 6));
  q = mul_add(q, r, T(0.5));
  const T series = r * r * q, direct = er - T(1) - r;
  return abs_of(r) < T(0.5) ? series : direct;
}

/// atanh(t) for |t| <= 1/3
template <class T>
NRL_INLINE T atanh_small(T t) {
  const T z = t * t;
  T q;
  if (sizeof(T) == 4) {
    q = T(1.0 / 15);
  } else {
    q = T(1.0 / 33);
    q = mul_add(q, z, T(1.0 / 31));
    q = mul_add(q, z, T(1.0 / 29));
    q = mul_add(q, z, T(1.0 / 27));
    q = mul_add(q, z, T(1.0 / 25));
    q = mul_add(q, z, T(1.0 / 23));
    q = mul_add(q, z, T(1.0 / 21));
    q = mul_add(q, z, T(1.0 / 19));
    q = mul_add(q, z, T(1.0 / 17));
    q = mul_add(q, z, T(1.0 / 15));
  }
  q = mul_add(q, z, T(1.0 / 13));
  q = mul_add(q, z, T(1.0 / 11));
  q = mul_add(q, z, T(1.0 / 9));
  q = mul_add(q, z, T(1.0 / 7));
  q = mul_add(q, z, T(1.0 / 5));
  q = mul_add(q, z, T(1.0 / 3));
  return t + t * z * q;
}

/// log(cosh(a / 2)) for a >= 0, given w = e^-a and k3 = e^a - 1 - a, accurate relative to the result everywhere.
template <class T>
NRL_INLINE T log_cosh_half(T a, T w, T k3) {
  const T em1 = k3 + a;
  const T s = em1 * em1 * w * T(0.25);  // sinh^2(a/2); log cosh = log1p(s) / 2 = atanh(s / (2 + s))
  const bool near = a < T(1.7);
  const T t = (near ? s : w - T(1)) / ((near ? s : w) + (near ? T(2) : T(3)));
  const T y = atanh_small(t);
  return near ? y : a * T(0.5) + T(2) * y;
}

}  // namespace nemo_rl::kernels
