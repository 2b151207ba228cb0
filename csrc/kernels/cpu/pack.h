// Sixteen numbers in place of one: the formulas of kernels/*.h are templates, and take a Pack<T> as they take a T. Made
// of the machine's own vectors (GCC takes wider ones apart lane by lane), so a token's lane is the same everywhere.
//
// Locals of type Pack<T>, and of structs of them, are not const, here and in the formulas: GCC 12 takes a const struct
// for read-only memory, which it never keeps in registers alone (the clipped loss took 1.3 times as long).
#pragma once
#ifndef NRL_CAPABILITY
#error "pack.h belongs to csrc/kernels/cpu/*.cpp, which are compiled once for every CPU capability"
#endif
#include <cstdint>
#include <cstring>

#include "kernels/cpu/native_vector.h"
#include "kernels/elementwise_math.h"

namespace nemo_rl::kernels {
namespace {  // nothing here may be shared between capabilities

inline constexpr int kPackLanes = 16;

template <class T>
struct Pack {
  using Scalar = T;
  using Values = typename NativeVector<T>::Values;
  static constexpr int kWidth = kNativeBytes / sizeof(T), kParts = kPackLanes / kWidth;
  Values part[kParts];

  Pack() = default;
  NRL_INLINE_MEMBER explicit Pack(double value) {
    for (auto& p : part) p = Values{} + static_cast<T>(value);
  }
};

template <class T>
NRL_INLINE Pack<T> load_pack(const T* p) {
  Pack<T> v;
  for (int i = 0; i < Pack<T>::kParts; ++i) std::memcpy(&v.part[i], p + i * Pack<T>::kWidth, kNativeBytes);
  return v;
}

template <class T>
NRL_INLINE void store_pack(T* p, Pack<T> v) {
  for (int i = 0; i < Pack<T>::kParts; ++i) std::memcpy(p + i * Pack<T>::kWidth, &v.part[i], kNativeBytes);
}

/// The first n < 16 numbers at p; the other lanes are 0.
template <class T>
NRL_INLINE Pack<T> load_pack(const T* p, int n) {
  alignas(64) T lanes[kPackLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load_pack(lanes);
}

template <class T>
NRL_INLINE void store_pack(T* p, Pack<T> v, int n) {
  alignas(64) T lanes[kPackLanes];
  store_pack(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

#define NRL_PACK_ARITHMETIC(op)                                                   \
  template <class T>                                                              \
  NRL_INLINE Pack<T> operator op(Pack<T> a, Pack<T> b) {                          \
    for (int i = 0; i < Pack<T>::kParts; ++i) a.part[i] = a.part[i] op b.part[i]; \
    return a;                                                                     \
  }
NRL_PACK_ARITHMETIC(+)
NRL_PACK_ARITHMETIC(-)
NRL_PACK_ARITHMETIC(*)
NRL_PACK_ARITHMETIC(/)
#undef NRL_PACK_ARITHMETIC

template <class T>
NRL_INLINE Pack<T> operator-(Pack<T> a) {
  for (auto& p : a.part) p = -p;
  return a;
}

#if defined(__AVX512F__)
/// One bit a lane.
template <class T>
struct PackMask {
  std::uint16_t bits;
};

template <int predicate>
NRL_INLINE PackMask<float> compare(Pack<float> a, Pack<float> b) {
  return {_mm512_cmp_ps_mask(a.part[0], b.part[0], predicate)};
}
template <int predicate>
NRL_INLINE PackMask<double> compare(Pack<double> a, Pack<double> b) {
  const unsigned low = _mm512_cmp_pd_mask(a.part[0], b.part[0], predicate);
  return {static_cast<std::uint16_t>(low | unsigned{_mm512_cmp_pd_mask(a.part[1], b.part[1], predicate)} << 8)};
}
#define NRL_PACK_COMPARISON(op, predicate)                   \
  template <class T>                                         \
  NRL_INLINE PackMask<T> operator op(Pack<T> a, Pack<T> b) { \
    return compare<predicate>(a, b);                         \
  }
NRL_PACK_COMPARISON(<, _CMP_LT_OQ)
NRL_PACK_COMPARISON(<=, _CMP_LE_OQ)
NRL_PACK_COMPARISON(>, _CMP_GT_OQ)
NRL_PACK_COMPARISON(>=, _CMP_GE_OQ)
NRL_PACK_COMPARISON(==, _CMP_EQ_OQ)
NRL_PACK_COMPARISON(!=, _CMP_NEQ_UQ)
#undef NRL_PACK_COMPARISON

template <class T>
NRL_INLINE PackMask<T> operator&(PackMask<T> a, PackMask<T> b) {
  return {static_cast<std::uint16_t>(a.bits & b.bits)};
}
template <class T>
NRL_INLINE PackMask<T> operator|(PackMask<T> a, PackMask<T> b) {
  return {static_cast<std::uint16_t>(a.bits | b.bits)};
}
template <class T>
NRL_INLINE bool all_of(PackMask<T> m) {
  return m.bits == 0xFFFF;
}

NRL_INLINE Pack<float> select(PackMask<float> m, Pack<float> a, Pack<float> b) {
  a.part[0] = _mm512_mask_blend_ps(m.bits, b.part[0], a.part[0]);
  return a;
}
NRL_INLINE Pack<double> select(PackMask<double> m, Pack<double> a, Pack<double> b) {
  a.part[0] = _mm512_mask_blend_pd(static_cast<__mmask8>(m.bits), b.part[0], a.part[0]);
  a.part[1] = _mm512_mask_blend_pd(static_cast<__mmask8>(m.bits >> 8), b.part[1], a.part[1]);
  return a;
}
#else
/// All bits of a lane set where true.
template <class T>
struct PackMask {
  typename NativeVector<T>::Bits part[Pack<T>::kParts];
};

#define NRL_PACK_COMPARISON(op)                                                   \
  template <class T>                                                              \
  NRL_INLINE PackMask<T> operator op(Pack<T> a, Pack<T> b) {                      \
    PackMask<T> m;                                                                \
    for (int i = 0; i < Pack<T>::kParts; ++i) m.part[i] = a.part[i] op b.part[i]; \
    return m;                                                                     \
  }
NRL_PACK_COMPARISON(<)
NRL_PACK_COMPARISON(<=)
NRL_PACK_COMPARISON(>)
NRL_PACK_COMPARISON(>=)
NRL_PACK_COMPARISON(==)
NRL_PACK_COMPARISON(!=)
#undef NRL_PACK_COMPARISON

template <class T>
NRL_INLINE PackMask<T> operator&(PackMask<T> a, PackMask<T> b) {
  for (int i = 0; i < Pack<T>::kParts; ++i) a.part[i] &= b.part[i];
  return a;
}
template <class T>
NRL_INLINE PackMask<T> operator|(PackMask<T> a, PackMask<T> b) {
  for (int i = 0; i < Pack<T>::kParts; ++i) a.part[i] |= b.part[i];
  return a;
}
template <class T>
NRL_INLINE bool all_of(PackMask<T> m) {
  typename NativeVector<T>::Bits every = m.part[0];
  for (int i = 1; i < Pack<T>::kParts; ++i) every &= m.part[i];
#if defined(__AVX2__)
  return _mm256_movemask_epi8(reinterpret_cast<__m256i>(every)) == -1;
#else
  std::uint64_t words[2];
  std::memcpy(words, &every, sizeof(words));
  return (words[0] & words[1]) == ~std::uint64_t{0};
#endif
}

template <class T>
NRL_INLINE Pack<T> select(PackMask<T> m, Pack<T> a, Pack<T> b) {
  for (int i = 0; i < Pack<T>::kParts; ++i) a.part[i] = m.part[i] ? a.part[i] : b.part[i];
  return a;
}
#endif

/// a * b + c, in one rounding where the capability has one: the same as the scalar mul_add.
template <class T>
NRL_INLINE Pack<T> mul_add(Pack<T> a, Pack<T> b, Pack<T> c) {
  for (int i = 0; i < Pack<T>::kParts; ++i) c.part[i] = fma(a.part[i], b.part[i], c.part[i]);
  return c;
}

#if defined(__AVX512F__)
/// The scalar clamp_to in two instructions, which return their second operand for a NaN.
NRL_INLINE Pack<float> clamp_to(Pack<float> x, Pack<float> lo, Pack<float> hi) {
  x.part[0] = _mm512_min_ps(hi.part[0], _mm512_max_ps(lo.part[0], x.part[0]));
  return x;
}
#endif

template <class T>
NRL_INLINE Pack<T> abs_of(Pack<T> x) {
  using Bits = typename NativeVector<T>::Bits;
  for (auto& p : x.part) {
    Bits bits;
    std::memcpy(&bits, &p, sizeof(bits));
    bits &= ~(Bits{} + (decltype(bits[0] + 0){1} << (8 * sizeof(T) - 1)));
    std::memcpy(&p, &bits, sizeof(bits));
  }
  return x;
}

/// p * 2^n, n a whole number that `shifted` holds in its low bits.
template <class T>
NRL_INLINE Pack<T> times_power_of_two(Pack<T> p, Pack<T> shifted, Pack<T> n) {
  for (int i = 0; i < Pack<T>::kParts; ++i) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) p.part[i] = _mm512_scalef_ps(p.part[i], n.part[i]);
    else p.part[i] = _mm512_scalef_pd(p.part[i], n.part[i]);
#else
    constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52, kBias = sizeof(T) == 4 ? 127 : 1023;
    using Bits = typename NativeVector<T>::Bits;
    Bits k, round;
    const auto zero = typename NativeVector<T>::Values{} + (sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0));
    std::memcpy(&k, &shifted.part[i], sizeof(k));
    std::memcpy(&round, &zero, sizeof(round));
    k -= round;
    const Bits half = k >> 1;
    const Bits first_bits = (half + kBias) << kMantissa, second_bits = (k - half + kBias) << kMantissa;
    typename NativeVector<T>::Values first, second;
    std::memcpy(&first, &first_bits, sizeof(first));
    std::memcpy(&second, &second_bits, sizeof(second));
    p.part[i] = p.part[i] * first * second;
#endif
  }
  return p;
}
NRL_INLINE Pack<float> exp_of(Pack<float> x) { return exp_single(x); }
NRL_INLINE Pack<double> exp_of(Pack<double> x) { return exp_double(x); }

}  // namespace
}  // namespace nemo_rl::kernels
