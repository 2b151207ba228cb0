// What every product multiplies, for each type and capability: single terms of a sum, or pairs of bfloat16 where the
// processor multiplies pairs. Forward, backward, the register tile and attention all ask this one trait.
#pragma once
#include <type_traits>

#include "kernels/cpu/plain.h"
#include "kernels/cpu/vec.h"
#include "kernels/sum_order.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX512BF16__)
/// c + the products of a pair in each lane.
NRL_VEC Register<float> fma(Register<std::uint32_t> a, Register<std::uint32_t> b, Register<float> c) {
  return _mm512_dpbf16_ps(c, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
#endif

/// A "word" is what one lane multiplies at a time: one term of the sum, or a pair of them, the earlier one in the lower
/// half. A "quad" is four consecutive words of a row of w, a "column" 32 bits of each of kLanes rows.
template <class T>
struct SingleTerms {
  using V = ShortVec<T>;            ///< of words, and of sums
  using Word = typename V::Scalar;  ///< a pair: its bits
  static constexpr SumOrder kOrder = SumOrder::terms;
  static constexpr int kPerWord = 1;
  static constexpr int kPerColumn = 1;  // words
  /// Up to kLanes consecutive words of a row; terms [terms, ...) are zero.
  NRL_VEC static V words(const T* x, int terms) { return terms >= V::kLanes ? load<V>(x) : load<V>(x, terms); }
  /// One word of each of n <= kLanes columns that lie side by side: of a row, or of a row and the one ldx after it.
  NRL_VEC static V across(const T* x, std::int64_t, int, int n) { return n == V::kLanes ? load<V>(x) : load<V>(x, n); }
  /// One word whose terms lie `stride` apart, of which `terms` exist.
  NRL_VEC static Word word(const T* w, int, std::int64_t = 1) { return static_cast<Word>(*w); }
  /// Word u of the quad at w, in every lane.
  NRL_VEC static V quad_weight(const T* w, int u) { return V(static_cast<Word>(w[u])); }
  NRL_VEC static V multiply_add(V a, V b, V c) { return mul_add(a, b, c); }
  /// acc + the words of a column times as many of a row of packed x.
  NRL_VEC static V add_column(V column, const Word* x, V acc) { return multiply_add(column, V(*x), acc); }
};

template <class T>
struct Terms : SingleTerms<T> {};

#if defined(__AVX512BF16__)
template <>
struct Terms<bfloat16> {
  using V = ShortVec<bfloat16>;
  using Word = float;
  static constexpr SumOrder kOrder = SumOrder::pairs;
  static constexpr int kPerWord = 2, kPerColumn = 1;
  NRL_VEC static V of_bits(__m512i words) {
    V v;
    v.part[0] = _mm512_castsi512_ps(words);
    return v;
  }
  NRL_VEC static V words(const bfloat16* x, int terms) {
    const __mmask32 mask = terms >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((1u << terms) - 1);
    return of_bits(_mm512_maskz_loadu_epi16(mask, x));
  }
  NRL_VEC static V across(const bfloat16* x, std::int64_t ldx, int terms, int n) {
    const auto mask = static_cast<__mmask16>(first_lanes(n));
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x));
    const __m512i high =
        terms > 1 ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x + ldx)) : _mm512_setzero_si512();
    return of_bits(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  NRL_VEC static Word word(const bfloat16* w, int terms, std::int64_t stride = 1) {
    const std::uint32_t pair = w[0].bits | (terms > 1 ? static_cast<std::uint32_t>(w[stride].bits) << 16 : 0u);
    return __builtin_bit_cast(Word, pair);
  }
  NRL_VEC static V quad_weight(const bfloat16* w, int u) {
    Word pair;
    __builtin_memcpy(&pair, w + 2 * u, sizeof(pair));
    return V(pair);
  }
  /// The quad at w in every 128 bits, and its word u in every lane.
  NRL_VEC static V quad(const bfloat16* w) {
    return of_bits(_mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w))));
  }
  template <int u>
  NRL_VEC static V of_quad(V quad) {
    quad.part[0] = _mm512_permute_ps(quad.part[0], 0x55 * u);
    return quad;
  }
  NRL_VEC static V multiply_add(V a, V b, V c) {
    using Pairs = Register<std::uint32_t>;
    c.part[0] = fma(reinterpret_cast<Pairs>(a.part[0]), reinterpret_cast<Pairs>(b.part[0]), c.part[0]);
    return c;
  }
  NRL_VEC static V add_column(V column, const Word* x, V acc) { return multiply_add(column, V(*x), acc); }
};
#elif defined(__AVX2__)
/// Two bfloat16 are read as one 32-bit element and taken apart in registers: reading a single one costs a shuffle more.
template <>
struct Terms<bfloat16> : SingleTerms<bfloat16> {
  static constexpr int kPerColumn = 2;
  NRL_VEC static V quad_weight(const bfloat16* w, int u) {
    Word pair;
    __builtin_memcpy(&pair, w + u / 2 * 2, sizeof(pair));
    return u % 2 ? second(V(pair)) : first(V(pair));
  }
  NRL_VEC static V add_column(V column, const Word* x, V acc) {
    return multiply_add(second(column), V(x[1]), multiply_add(first(column), V(x[0]), acc));
  }

 private:
  using Bits = Register<std::uint32_t>;
  NRL_VEC static V first(V pairs) {
    pairs.part[0] = reinterpret_cast<V::Part>(reinterpret_cast<Bits>(pairs.part[0]) << 16);
    return pairs;
  }
  NRL_VEC static V second(V pairs) {
    pairs.part[0] = reinterpret_cast<V::Part>(reinterpret_cast<Bits>(pairs.part[0]) & 0xffff0000u);
    return pairs;
  }
};
#endif

/// Words of a row of K terms.
template <class T>
constexpr std::int64_t words_of(std::int64_t K) {
  return (K + Terms<T>::kPerWord - 1) / Terms<T>::kPerWord;
}

/// A square of kLanes words of kLanes rows, turned: put(i, word i of every row) for i < words. Rows from `rows` on and
/// terms from `terms` on are zero. All packing with rows side by side goes through it: x and w of the forward product,
/// rows of the backward ones.
template <class T, class Put>
NRL_VEC void turn_square(const T* x, std::int64_t ldx, std::int64_t rows, std::int64_t terms, std::int64_t words,
                         const Put& put) {
  using X = Terms<T>;
  using V = typename X::V;
  constexpr int kLanes = V::kLanes;
  const int present = static_cast<int>(smaller<std::int64_t>(terms, kLanes * X::kPerWord));
  V v[kLanes];
  for (int i = 0; i < kLanes; ++i) v[i] = i < rows ? X::words(x + i * ldx, present) : V{};
  transpose(v);
  for (int i = 0; i < kLanes && i < words; ++i) put(i, v[i]);
}

/// Words from one packed row to the next, where few rows are packed one by one: whole vectors.
template <class T>
constexpr std::int64_t packed_row_words(std::int64_t K) {
  constexpr int kLanes = Terms<T>::V::kLanes;
  return (words_of<T>(K) + kLanes - 1) / kLanes * kLanes;
}

/// Terms [k, k + kPerWord), as far as they exist, of kLanes rows of w: one word a lane.
template <class T>
[[gnu::always_inline]] inline typename Terms<T>::V gathered(const T* const* w, std::int64_t k, std::int64_t K) {
  using V = typename Terms<T>::V;
  alignas(64) typename Terms<T>::Word lanes[V::kLanes];
  for (int i = 0; i < V::kLanes; ++i)
    lanes[i] = Terms<T>::word(w[i] + k, static_cast<int>(smaller<std::int64_t>(K - k, Terms<T>::kPerWord)));
  return load<V>(lanes);
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
  ShortVec<float> column[4];

  [[gnu::always_inline]] Turned(const T* const* w, std::int64_t k) {
    const auto at = [&](int row) { return _mm_loadu_ps(reinterpret_cast<const float*>(w[row] + k)); };
    Register<float> row[4];
    for (int j = 0; j < 4; ++j) row[j] = parts(at, j);
    const auto low01 = pairs_low(row[0], row[1]), high01 = pairs_high(row[0], row[1]);
    const auto low23 = pairs_low(row[2], row[3]), high23 = pairs_high(row[2], row[3]);
    column[0].part[0] = quads_low(low01, low23), column[1].part[0] = quads_high(low01, low23);
    column[2].part[0] = quads_low(high01, high23), column[3].part[0] = quads_high(high01, high23);
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
