// What the forward product multiplies: how x is packed and how weights are read, for each type and capability. Either
// operand may lie in the lanes; an output's operations are the same.
#pragma once
#include "kernels/cpu/native_vector.h"
#include "kernels/cpu/plain.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/transpose.h"
#include "kernels/sum_order.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// A "word" is what one lane multiplies at a time: one term of the sum, or a pair of them where the machine multiplies
/// pairs of bfloat16. x is packed as words. A "quad" is four consecutive words of a row of w, a "column" 32 bits of
/// each of kLanes rows.
template <class T>
struct SingleTerms {
  using S = simd_t<T>;
  using V = typename S::V;
  using Word = typename S::Scalar;
  static constexpr SumOrder kOrder = SumOrder::terms;
  static constexpr int kPerWord = 1;
  static constexpr int kPerColumn = 1;  // words
  /// Up to kLanes consecutive words from x; terms [terms, ...) are zero.
  static V words(const T* x, int terms) { return terms >= S::kLanes ? S::load(x) : S::load(x, terms); }
  /// Word u of the quad at w, in every lane.
  static V quad_weight(const T* w, int u) { return S::set1(static_cast<Word>(w[u])); }
  /// One word of which `terms` terms exist.
  static Word word(const T* w, int) { return static_cast<Word>(*w); }
  static V multiply_add(V a, V b, V c) { return S::fma(a, b, c); }
  /// acc + the words of a column times as many of a row of packed x.
  static V add_column(V column, const Word* x, V acc) { return multiply_add(column, S::set1(*x), acc); }
};

template <class T>
struct Terms : SingleTerms<T> {};

#if defined(__AVX512BF16__)
template <>
struct Terms<bfloat16> {
  using S = F32;
  using V = S::V;
  using Word = float;  // the bits of a pair
  static constexpr SumOrder kOrder = SumOrder::pairs;
  static constexpr int kPerWord = 2, kPerColumn = 1;
  static V words(const bfloat16* x, int terms) {
    const __mmask32 mask = terms >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((1u << terms) - 1);
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, x));
  }
  static V quad_weight(const bfloat16* w, int u) {
    Word pair;
    __builtin_memcpy(&pair, w + 2 * u, sizeof(pair));
    return S::set1(pair);
  }
  static Word word(const bfloat16* w, int terms) {
    const std::uint32_t pair = w[0].bits | (terms > 1 ? static_cast<std::uint32_t>(w[1].bits) << 16 : 0u);
    Word word;
    __builtin_memcpy(&word, &pair, sizeof(word));
    return word;
  }
  static V multiply_add(V a, V b, V c) {
    return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static V add_column(V column, const Word* x, V acc) { return multiply_add(column, S::set1(*x), acc); }
};
#elif defined(__AVX2__)
/// Two bfloat16 are read as one 32-bit element and taken apart in registers: reading a single one costs a shuffle more.
template <>
struct Terms<bfloat16> : SingleTerms<bfloat16> {
  static constexpr int kPerColumn = 2;
  static V quad_weight(const bfloat16* w, int u) {
    Word pair;
    __builtin_memcpy(&pair, w + u / 2 * 2, sizeof(pair));
    return u % 2 ? second(S::set1(pair)) : first(S::set1(pair));
  }
  static V add_column(V column, const Word* x, V acc) {
    return multiply_add(second(column), S::set1(x[1]), multiply_add(first(column), S::set1(x[0]), acc));
  }

 private:
  using Bits = NativeUnsigned;
  static V first(V pairs) { return reinterpret_cast<V>(reinterpret_cast<Bits>(pairs) << 16); }
  static V second(V pairs) { return reinterpret_cast<V>(reinterpret_cast<Bits>(pairs) & 0xffff0000u); }
};
#endif

/// Words of a row of K terms.
template <class T>
constexpr std::int64_t words_of(std::int64_t K) {
  return (K + Terms<T>::kPerWord - 1) / Terms<T>::kPerWord;
}

/// v[i][j] and v[j][i] change places.
template <class S>
[[gnu::always_inline]] inline void turn(typename S::V (&v)[S::kLanes]) {
#if defined(__AVX2__)
  transpose_square<decltype(v[0] < v[0])>(v);
#else
  for (int i = 0; i < S::kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      const auto kept = v[i].x[j];
      v[i].x[j] = v[j].x[i], v[j].x[i] = kept;
    }
#endif
}

/// Words from one packed row to the next, where few rows are packed one by one: whole vectors.
template <class T>
constexpr std::int64_t packed_row_words(std::int64_t K) {
  constexpr int kLanes = Terms<T>::S::kLanes;
  return (words_of<T>(K) + kLanes - 1) / kLanes * kLanes;
}

/// Terms [k, k + kPerWord), as far as they exist, of kLanes rows of w: one word a lane.
template <class T>
[[gnu::always_inline]] inline typename Terms<T>::V gathered(const T* const* w, std::int64_t k, std::int64_t K) {
  using S = typename Terms<T>::S;
  alignas(64) typename Terms<T>::Word lanes[S::kLanes];
  for (int i = 0; i < S::kLanes; ++i)
    lanes[i] = Terms<T>::word(w[i] + k, static_cast<int>(smaller<std::int64_t>(K - k, Terms<T>::kPerWord)));
  return S::load(lanes);
}

/// 16 bytes of each of kLanes rows, turned so that lane i of column q holds 32-bit element q of row i. With AVX the
/// first half of the turn is done by loads into parts of a register, which leaves the shuffle unit half the work.
template <class T>
struct Turned {
  static constexpr bool kAvailable =
#if defined(__AVX2__)
      sizeof(T) <= 4;
#else
      false;
#endif
  static constexpr int kTerms = 16 / static_cast<int>(sizeof(T));
#if defined(__AVX2__)
  F32::V column[4];

  [[gnu::always_inline]] Turned(const T* const* w, std::int64_t k) {
    const auto at = [&](int row) { return _mm_loadu_ps(reinterpret_cast<const float*>(w[row] + k)); };
    F32::V row[4];
    for (int j = 0; j < 4; ++j) row[j] = parts(at, j);
    const auto low01 = pairs_low(row[0], row[1]), high01 = pairs_high(row[0], row[1]);
    const auto low23 = pairs_low(row[2], row[3]), high23 = pairs_high(row[2], row[3]);
    column[0] = quads_low(low01, low23), column[1] = quads_high(low01, low23);
    column[2] = quads_low(high01, high23), column[3] = quads_high(high01, high23);
  }

 private:
#if defined(__AVX512F__)
  template <class At>
  [[gnu::always_inline]] static __m512 parts(const At& at, int j) {
    __m512 v = _mm512_castps128_ps512(at(j));
    v = _mm512_mask_broadcast_f32x4(v, 0x00f0, at(j + 4));
    v = _mm512_mask_broadcast_f32x4(v, 0x0f00, at(j + 8));
    return _mm512_mask_broadcast_f32x4(v, 0xf000, at(j + 12));
  }
  static __m512 pairs_low(__m512 a, __m512 b) { return _mm512_unpacklo_ps(a, b); }
  static __m512 pairs_high(__m512 a, __m512 b) { return _mm512_unpackhi_ps(a, b); }
  static __m512 quads_low(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
  static __m512 quads_high(__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  }
#else
  template <class At>
  [[gnu::always_inline]] static __m256 parts(const At& at, int j) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(at(j)), at(j + 4), 1);
  }
  static __m256 pairs_low(__m256 a, __m256 b) { return _mm256_unpacklo_ps(a, b); }
  static __m256 pairs_high(__m256 a, __m256 b) { return _mm256_unpackhi_ps(a, b); }
  static __m256 quads_low(__m256 a, __m256 b) {
    return _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
  }
  static __m256 quads_high(__m256 a, __m256 b) {
    return _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(a), _mm256_castps_pd(b)));
  }
#endif
#endif
};

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
