// The value type of the CPU kernels: Vec<T>, sixteen numbers in place of one, made of the machine's own registers
// (vec_register.h). On AVX-512 sixteen floats are one register, on AVX2 two, elsewhere four. The formulas of
// kernels/*.h are templates and take a Vec<T> as they take a T, so a token's lane holds the same number everywhere.
//
//   load<V>(p), store(p, v)          of T; floats also of bfloat16, doubles also of float
//   load<V>(p, n), store(p, v, n)    the first n lanes; zeros, or a fill, after them
//   + - * /  mul_add  max_of min_of  lane by lane; mul_add rounds once where the capability can
//   < <= ...  select  all_of  & |    masks
//   sum_of largest_of                over the lanes, as a fixed tree: lane i with lane i + L/2, then + L/4, ...
//   exp_of exp_flushed sigmoid       kernels/elementwise_math.h
//
// ShortVec<T> has the lanes of one register (of two without AVX): what products and norms count in.
//
// Locals of type Vec<T>, and of structs of them, are not const, here and in the formulas: GCC 12 takes a const struct
// for read-only memory, which it never keeps in registers alone (the clipped loss took 1.3 times as long).
#pragma once
#include "kernels/cpu/vec_register.h"
#include "kernels/elementwise_math.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

using kernels::abs_of, kernels::all_of, kernels::clamp_to, kernels::exp_of, kernels::mul_add, kernels::select,
    kernels::times_power_of_two;  // of one number; those of a Vec stand beside them

inline constexpr int kLanes = 16;

template <class T, int Lanes = 16>
struct Vec {
  using Scalar = T;
  using Part = Register<T>;
  static constexpr int kLanes = Lanes, kWidth = kRegisterLanes<T>, kParts = Lanes / kWidth;
  static_assert(kParts * kWidth == Lanes);
  Part part[kParts];

  Vec() = default;
  /// The value in every lane. Its bits are kept: floats also carry pairs of bfloat16 (terms.h).
  template <class X>
  [[gnu::always_inline]] explicit Vec(X value) {
    for (auto& p : part) p = splat(static_cast<T>(value));
  }
};
using Floats = Vec<float>;

/// One register; two where registers have 16 bytes.
template <class T>
using ShortVec = Vec<accumulate_t<T>, (kRegisterBytes > 32 ? kRegisterBytes : 32) / sizeof(accumulate_t<T>)>;

// ---------------------------------------------------------------- memory

template <class V, class E>
NRL_VEC V load(const E* p) {
  V v;
  for (int i = 0; i < V::kParts; ++i) {
    if constexpr (sizeof(typename V::Scalar) == 8) v.part[i] = load_doubles(p + i * V::kWidth);
    else v.part[i] = load(p + i * V::kWidth);
  }
  return v;
}
template <class E, class T, int L>
NRL_VEC void store(E* p, Vec<T, L> v) {
  for (int i = 0; i < v.kParts; ++i) {
    if constexpr (sizeof(T) == 8) store_doubles(p + i * v.kWidth, v.part[i]);
    else store(p + i * v.kWidth, v.part[i]);
  }
}

/// The first n lanes, n at most their number; the others are 0.
template <class V, class E>
NRL_VEC V load(const E* p, int n) {
  if constexpr (V::kParts == 1 && sizeof(E) <= sizeof(typename V::Scalar)) {
    V v;
    v.part[0] = load(p, n);
    return v;
  } else {
    alignas(64) E lanes[V::kLanes] = {};
    std::memcpy(static_cast<void*>(lanes), p, static_cast<std::size_t>(n) * sizeof(E));
    return load<V>(lanes);
  }
}
/// The same; the others are `fill`.
template <class V>
NRL_VEC V load(const typename V::Scalar* p, int n, typename V::Scalar fill) {
  alignas(64) typename V::Scalar lanes[V::kLanes];
  for (int i = 0; i < V::kLanes; ++i) lanes[i] = i < n ? p[i] : fill;
  return load<V>(lanes);
}
template <class E, class T, int L>
NRL_VEC void store(E* p, Vec<T, L> v, int n) {
  if constexpr (v.kParts == 1) {
    store(p, v.part[0], n);
  } else {
    alignas(64) E lanes[L];
    store(lanes, v);
    std::memcpy(static_cast<void*>(p), lanes, static_cast<std::size_t>(n) * sizeof(E));
  }
}

// ---------------------------------------------------------------- arithmetic

template <class T>
struct SameAs {  // a parameter that decides no template argument
  using type = T;
};

#define NRL_VEC_OPERATOR(op)                                               \
  template <class T, int L>                                                \
  NRL_VEC Vec<T, L> operator op(Vec<T, L> a, Vec<T, L> b) {                \
    for (int i = 0; i < a.kParts; ++i) a.part[i] = a.part[i] op b.part[i]; \
    return a;                                                              \
  }                                                                        \
  template <class T, int L>                                                \
  NRL_VEC Vec<T, L> operator op(Vec<T, L> a, typename SameAs<T>::type b) { \
    for (int i = 0; i < a.kParts; ++i) a.part[i] = a.part[i] op b;         \
    return a;                                                              \
  }                                                                        \
  template <class T, int L>                                                \
  NRL_VEC Vec<T, L> operator op(typename SameAs<T>::type a, Vec<T, L> b) { \
    for (int i = 0; i < b.kParts; ++i) b.part[i] = a op b.part[i];         \
    return b;                                                              \
  }
NRL_VEC_OPERATOR(+)
NRL_VEC_OPERATOR(-)
NRL_VEC_OPERATOR(*)
NRL_VEC_OPERATOR(/)
#undef NRL_VEC_OPERATOR

template <class T, int L>
NRL_VEC Vec<T, L> operator-(Vec<T, L> a) {
  for (auto& p : a.part) p = -p;
  return a;
}
template <class T, int L>
NRL_VEC Vec<T, L>& operator+=(Vec<T, L>& a, Vec<T, L> b) {
  return a = a + b;
}

/// a * b + c, in one rounding where the capability has one: the same as the scalar mul_add.
template <class T, int L>
NRL_VEC Vec<T, L> mul_add(Vec<T, L> a, Vec<T, L> b, Vec<T, L> c) {
  for (int i = 0; i < c.kParts; ++i) c.part[i] = fma(a.part[i], b.part[i], c.part[i]);
  return c;
}

template <class T, int L>
NRL_VEC Vec<T, L> max_of(Vec<T, L> a, Vec<T, L> b) {
  for (int i = 0; i < a.kParts; ++i) a.part[i] = max_of(a.part[i], b.part[i]);
  return a;
}
template <class T, int L>
NRL_VEC Vec<T, L> min_of(Vec<T, L> a, Vec<T, L> b) {
  for (int i = 0; i < a.kParts; ++i) a.part[i] = min_of(a.part[i], b.part[i]);
  return a;
}

template <class T, int L>
NRL_VEC Vec<T, L> abs_of(Vec<T, L> x) {
  using Bits = RegisterBits<T>;
  for (auto& p : x.part) {
    Bits bits;
    std::memcpy(&bits, &p, sizeof(bits));
    bits &= ~(Bits{} + (decltype(bits[0] + 0){1} << (8 * sizeof(T) - 1)));
    std::memcpy(&p, &bits, sizeof(bits));
  }
  return x;
}

/// v[i][j] and v[j][i] change places.
template <class T, int L>
NRL_VEC void transpose(Vec<T, L> (&v)[L]) {
  if constexpr (Vec<T, L>::kParts == 1) {
    Register<T> rows[L];
    for (int i = 0; i < L; ++i) rows[i] = v[i].part[0];
    transpose(rows);
    for (int i = 0; i < L; ++i) v[i].part[0] = rows[i];
  } else {
    T rows[L][L], column[L];
    for (int i = 0; i < L; ++i) store(rows[i], v[i]);
    for (int j = 0; j < L; ++j) {
      for (int i = 0; i < L; ++i) column[i] = rows[i][j];
      v[j] = load<Vec<T, L>>(column);
    }
  }
}

// ---------------------------------------------------------------- masks

#if defined(__AVX512F__)
/// One bit a lane.
template <class T, int L>
struct VecMask {
  std::uint16_t bits;
};

template <int predicate, class T, int L>
NRL_VEC VecMask<T, L> compare(Vec<T, L> a, Vec<T, L> b) {
  unsigned bits = 0;
  for (int i = 0; i < a.kParts; ++i) {
    if constexpr (sizeof(T) == 4) bits |= unsigned{_mm512_cmp_ps_mask(a.part[i], b.part[i], predicate)} << i * a.kWidth;
    else bits |= unsigned{_mm512_cmp_pd_mask(a.part[i], b.part[i], predicate)} << i * a.kWidth;
  }
  return {static_cast<std::uint16_t>(bits)};
}
#define NRL_VEC_COMPARISON(op, predicate)                       \
  template <class T, int L>                                     \
  NRL_VEC VecMask<T, L> operator op(Vec<T, L> a, Vec<T, L> b) { \
    return compare<predicate>(a, b);                            \
  }
NRL_VEC_COMPARISON(<, _CMP_LT_OQ)
NRL_VEC_COMPARISON(<=, _CMP_LE_OQ)
NRL_VEC_COMPARISON(>, _CMP_GT_OQ)
NRL_VEC_COMPARISON(>=, _CMP_GE_OQ)
NRL_VEC_COMPARISON(==, _CMP_EQ_OQ)
NRL_VEC_COMPARISON(!=, _CMP_NEQ_UQ)
#undef NRL_VEC_COMPARISON

template <class T, int L>
NRL_VEC VecMask<T, L> operator&(VecMask<T, L> a, VecMask<T, L> b) {
  return {static_cast<std::uint16_t>(a.bits & b.bits)};
}
template <class T, int L>
NRL_VEC VecMask<T, L> operator|(VecMask<T, L> a, VecMask<T, L> b) {
  return {static_cast<std::uint16_t>(a.bits | b.bits)};
}
template <class T, int L>
NRL_VEC bool all_of(VecMask<T, L> m) {
  return m.bits == (1u << L) - 1;
}

/// m ? a : b, lane by lane.
template <class T, int L>
NRL_VEC Vec<T, L> select(VecMask<T, L> m, Vec<T, L> a, Vec<T, L> b) {
  for (int i = 0; i < a.kParts; ++i) {
    const unsigned bits = unsigned{m.bits} >> i * a.kWidth;
    if constexpr (sizeof(T) == 4) a.part[i] = _mm512_mask_blend_ps(static_cast<__mmask16>(bits), b.part[i], a.part[i]);
    else a.part[i] = _mm512_mask_blend_pd(static_cast<__mmask8>(bits), b.part[i], a.part[i]);
  }
  return a;
}

/// The scalar clamp_to in two instructions, which return their second operand for a NaN.
NRL_VEC Vec<float> clamp_to(Vec<float> x, Vec<float> lo, Vec<float> hi) {
  x.part[0] = _mm512_min_ps(hi.part[0], _mm512_max_ps(lo.part[0], x.part[0]));
  return x;
}
#else
/// All bits of a lane set where true.
template <class T, int L>
struct VecMask {
  RegisterBits<T> part[Vec<T, L>::kParts];
};

#define NRL_VEC_COMPARISON(op)                                             \
  template <class T, int L>                                                \
  NRL_VEC VecMask<T, L> operator op(Vec<T, L> a, Vec<T, L> b) {            \
    VecMask<T, L> m;                                                       \
    for (int i = 0; i < a.kParts; ++i) m.part[i] = a.part[i] op b.part[i]; \
    return m;                                                              \
  }
NRL_VEC_COMPARISON(<)
NRL_VEC_COMPARISON(<=)
NRL_VEC_COMPARISON(>)
NRL_VEC_COMPARISON(>=)
NRL_VEC_COMPARISON(==)
NRL_VEC_COMPARISON(!=)
#undef NRL_VEC_COMPARISON

template <class T, int L>
NRL_VEC VecMask<T, L> operator&(VecMask<T, L> a, VecMask<T, L> b) {
  for (int i = 0; i < Vec<T, L>::kParts; ++i) a.part[i] &= b.part[i];
  return a;
}
template <class T, int L>
NRL_VEC VecMask<T, L> operator|(VecMask<T, L> a, VecMask<T, L> b) {
  for (int i = 0; i < Vec<T, L>::kParts; ++i) a.part[i] |= b.part[i];
  return a;
}
template <class T, int L>
NRL_VEC bool all_of(VecMask<T, L> m) {
  RegisterBits<T> every = m.part[0];
  for (int i = 1; i < Vec<T, L>::kParts; ++i) every &= m.part[i];
#if defined(__AVX2__)
  return _mm256_movemask_epi8(reinterpret_cast<__m256i>(every)) == -1;
#else
  std::uint64_t words[2];
  std::memcpy(words, &every, sizeof(words));
  return (words[0] & words[1]) == ~std::uint64_t{0};
#endif
}

/// m ? a : b, lane by lane.
template <class T, int L>
NRL_VEC Vec<T, L> select(VecMask<T, L> m, Vec<T, L> a, Vec<T, L> b) {
  for (int i = 0; i < a.kParts; ++i) a.part[i] = m.part[i] ? a.part[i] : b.part[i];
  return a;
}
#endif

// ---------------------------------------------------------------- over the lanes

/// Lane i with lane i + L/2, then with i + L/4, ...
template <class T, int L, class Combine>
NRL_VEC T folded(Vec<T, L> v, const Combine& combine) {
  alignas(64) T lanes[L];
  store(lanes, v);
  for (int half = L / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = combine(lanes[i], lanes[i + half]);
  return lanes[0];
}
template <class T, int L>
NRL_VEC T sum_of(Vec<T, L> v) {
  return folded(v, [](T a, T b) __attribute__((always_inline)) { return a + b; });
}
template <class T, int L>
NRL_VEC T largest_of(Vec<T, L> v) {
  return folded(v, [](T a, T b) __attribute__((always_inline)) { return a > b ? a : b; });
}

/// The lanes in ascending order, in double.
template <class T, int L>
NRL_VEC double sum_ascending(Vec<T, L> v) {
  alignas(64) T lanes[L];
  store(lanes, v);
  double total = 0;
  for (T x : lanes) total += static_cast<double>(x);
  return total;
}

// ---------------------------------------------------------------- exponentials

/// p * 2^n, n a whole number that `shifted` holds in its low bits: the vectors' version of what exp_single ends in.
template <class T, int L>
NRL_VEC Vec<T, L> times_power_of_two(Vec<T, L> p, Vec<T, L> shifted, Vec<T, L> n) {
  for (int i = 0; i < p.kParts; ++i) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) p.part[i] = _mm512_scalef_ps(p.part[i], n.part[i]);
    else p.part[i] = _mm512_scalef_pd(p.part[i], n.part[i]);
#else
    constexpr int kMantissa = sizeof(T) == 4 ? 23 : 52, kBias = sizeof(T) == 4 ? 127 : 1023;
    using Bits = RegisterBits<T>;
    Bits k, round;
    const Register<T> zero = Register<T>{} + (sizeof(T) == 4 ? T(12582912.0) : T(6755399441055744.0));
    std::memcpy(&k, &shifted.part[i], sizeof(k));
    std::memcpy(&round, &zero, sizeof(round));
    k -= round;
    const Bits half = k >> 1;
    const Bits first_bits = (half + kBias) << kMantissa, second_bits = (k - half + kBias) << kMantissa;
    Register<T> first, second;
    std::memcpy(&first, &first_bits, sizeof(first));
    std::memcpy(&second, &second_bits, sizeof(second));
    p.part[i] = p.part[i] * first * second;
#endif
  }
  return p;
}
template <int L>
NRL_VEC Vec<float, L> exp_of(Vec<float, L> x) {
  return exp_single(x);
}
template <int L>
NRL_VEC Vec<double, L> exp_of(Vec<double, L> x) {
  return exp_double(x);
}

/// 1 / (1 + exp(-x)).
template <int L>
NRL_VEC Vec<float, L> sigmoid(Vec<float, L> x) {
  return 1.0f / (1.0f + exp_flushed(0.0f - x));
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
