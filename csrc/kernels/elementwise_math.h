// Branch-free elementary functions for the per-token formulas. T is a float, a double, or on the CPU sixteen of them
// (kernels/cpu/vec.h); on CUDA exp_of is the device's own.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace nemo_rl::kernels {

/// The type of one number: T itself, or that of a vector's lanes.
template <class T, class = void>
struct ScalarOf {
  using type = T;
};
template <class T>
struct ScalarOf<T, decltype(void(sizeof(typename T::Scalar)))> {
  using type = typename T::Scalar;
};
template <class T>
using scalar_t = typename ScalarOf<T>::type;

/// condition ? a : b, lane by lane where the condition is a mask; both are computed.
template <class T>
NRL_INLINE T select(bool condition, T a, T b) {
  return condition ? a : b;
}

/// True where every lane of a mask is.
NRL_INLINE bool all_of(bool condition) { return condition; }

template <class T>
NRL_INLINE T abs_of(T x) {
  return x < T(0) ? -x : x;
}

/// NaN stays NaN, as in torch.clamp.
template <class T>
NRL_INLINE T clamp_to(T x, T lo, T hi) {
  T low = select(x < lo, lo, x);
  return select(low > hi, hi, low);
}

/// False for NaN and the infinities.
template <class T>
NRL_INLINE auto is_finite(T x) {
  return x - x == T(0);
}

/// torch.nan_to_num(x, nan=0, posinf=0, neginf=0)
template <class T>
NRL_INLINE T finite_or_zero(T x) {
  return select(is_finite(x), x, T(0));
}

/// a * b + c in one instruction where the target has one; plain C++ elsewhere, never a library call.
template <class T>
NRL_INLINE T mul_add(T a, T b, T c) {
#if defined(__CUDA_ARCH__)
  return fma(a, b, c);
#elif defined(__FMA__) || defined(__aarch64__)
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
/// p * 2^k, k being what the low bits of `shifted` hold; in two factors, so that denormal results and overflow come out
/// right. `n` is k as a number.
NRL_INLINE float times_power_of_two(float p, float shifted, float) {
  const std::int32_t k = static_cast<std::int32_t>(__builtin_bit_cast(std::uint32_t, shifted) - 0x4B400000u);
  const std::int32_t half = k >> 1;
  const float s1 = __builtin_bit_cast(float, static_cast<std::uint32_t>(half + 127) << 23);
  const float s2 = __builtin_bit_cast(float, static_cast<std::uint32_t>(k - half + 127) << 23);
  return p * s1 * s2;
}
NRL_INLINE double times_power_of_two(double p, double shifted, double) {
  const std::int64_t k = static_cast<std::int64_t>(__builtin_bit_cast(std::uint64_t, shifted) - 0x4338000000000000ull);
  const std::int64_t half = k >> 1;
  const double s1 = __builtin_bit_cast(double, static_cast<std::uint64_t>(half + 1023) << 52);
  const double s2 = __builtin_bit_cast(double, static_cast<std::uint64_t>(k - half + 1023) << 52);
  return p * s1 * s2;
}

/// The multiply-adds of an exponential: in one rounding where the target has that, or in two everywhere, so that every
/// CPU capability gives the same bits.
struct OnceRounded {
  template <class T>
  static NRL_INLINE_MEMBER T multiply_add(T a, T b, T c) {
    return mul_add(a, b, c);
  }
};
struct TwiceRounded {
  template <class T>
  static NRL_INLINE_MEMBER T multiply_add(T a, T b, T c) {
    return a * b + c;
  }
};

/// e^x within 2 units in the last place for lowest <= x; infinity from 89 on, NaN for NaN.
/// x = n ln 2 + r, a polynomial in r (Cephes), and times 2^n. ln 2 comes in two parts; n times the first is exact.
template <class Rounding, class T>
NRL_INLINE T exp_float(T x, float lowest) {
  T round(12582912.f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  T c = clamp_to(x, T(lowest), T(89.f));
  T shifted = Rounding::multiply_add(c, T(1.44269504088896341f), round);
  T n = shifted - round;
  T r = Rounding::multiply_add(n, T(2.12194440e-4f), Rounding::multiply_add(n, T(-0.693359375f), c));
  T p(1.9875691500e-4f);
  p = Rounding::multiply_add(p, r, T(1.3981999507e-3f));
  p = Rounding::multiply_add(p, r, T(8.3334519073e-3f));
  p = Rounding::multiply_add(p, r, T(4.1665795894e-2f));
  p = Rounding::multiply_add(p, r, T(1.6666665459e-1f));
  p = Rounding::multiply_add(p, r, T(5.0000001201e-1f));
  p = Rounding::multiply_add(p, r * r, r) + T(1.f);
  return times_power_of_two(p, shifted, n);
}

/// The loss's: results reach down to the smallest subnormal number.
template <class T>
NRL_INLINE T exp_single(T x) {
  return exp_float<OnceRounded>(x, -104.f);
}

/// The softmax's and the sigmoid's: the same bits on every capability, and a result below FLT_MIN is 0, since subnormal
/// numbers cost hundreds of cycles on some machines and no sum of ours can see them.
template <class T>
NRL_INLINE T exp_flushed(T x) {
  T low(-87.33654f);
  return select(x < low, T(0.f), exp_float<TwiceRounded>(x, -87.33654f));
}

template <class T>
NRL_INLINE T exp_double(T x) {
  T round(6755399441055744.0);  // 1.5 * 2^52
  T c = clamp_to(x, T(-746.0), T(710.0));
  T shifted = mul_add(c, T(1.4426950408889634074), round);
  T n = shifted - round;
  T r = mul_add(n, T(-1.42860682030941723212e-6), mul_add(n, T(-6.93145751953125e-1), c));
  T p(1.0 / 6227020800.0);
  p = mul_add(p, r, T(1.0 / 479001600.0));
  p = mul_add(p, r, T(1.0 / 39916800.0));
  p = mul_add(p, r, T(1.0 / 3628800.0));
  p = mul_add(p, r, T(1.0 / 362880.0));
  p = mul_add(p, r, T(1.0 / 40320.0));
  p = mul_add(p, r, T(1.0 / 5040.0));
  p = mul_add(p, r, T(1.0 / 720.0));
  p = mul_add(p, r, T(1.0 / 120.0));
  p = mul_add(p, r, T(1.0 / 24.0));
  p = mul_add(p, r, T(1.0 / 6.0));
  p = mul_add(p, r, T(0.5));
  p = mul_add(p, r * r, r) + T(1.0);
  return times_power_of_two(p, shifted, n);
}

NRL_INLINE float exp_of(float x) { return exp_single(x); }
NRL_INLINE double exp_of(double x) { return exp_double(x); }
#endif

/// e^r - 1 - r near 0, where the direct form would lose every digit.
template <class T>
NRL_INLINE T exp_minus_linear_series(T r) {
  T q;
  if (sizeof(scalar_t<T>) == 4) {
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
  return r * r * q;
}

/// e^r - 1 - r, given er = e^r
template <class T>
NRL_INLINE T exp_minus_linear(T r, T er) {
  return select(abs_of(r) < T(0.5), exp_minus_linear_series(r), er - T(1) - r);
}

/// e^r - 1 - r; takes no exponential where every r is near 0
template <class T>
NRL_INLINE T exp_minus_linear(T r) {
  T series = exp_minus_linear_series(r);
  const auto near = abs_of(r) < T(0.5);
  if (all_of(near)) return series;
  return select(near, series, exp_of(r) - T(1) - r);
}

/// atanh(t) for |t| <= 1/3
template <class T>
NRL_INLINE T atanh_small(T t) {
  T z = t * t;
  T q;
  if (sizeof(scalar_t<T>) == 4) {
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
  T em1 = k3 + a;
  T s = em1 * em1 * w * T(0.25);  // sinh^2(a/2); log cosh = log1p(s) / 2 = atanh(s / (2 + s))
  const auto near = a < T(1.7);
  T t = select(near, s, w - T(1)) / (select(near, s, w) + select(near, T(2), T(3)));
  T y = atanh_small(t);
  return select(near, y, a * T(0.5) + T(2) * y);
}

}  // namespace nemo_rl::kernels
