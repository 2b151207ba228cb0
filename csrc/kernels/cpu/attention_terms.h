// What the attention kernels multiply: the words of terms.h with types of their own, which say how registers of them
// are loaded and multiplied.
#pragma once
#include <type_traits>
#include <utility>

#include "kernels/attention.h"
#include "kernels/cpu/terms.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

/// A pair of bfloat16 where the machine multiplies pairs, the term with the even index in the lower half; otherwise a
/// number of the arithmetic's type.
template <class Elem>
using AttentionWord = std::conditional_t<Terms<Elem>::kPerWord == 2, std::uint32_t, accumulate_t<Elem>>;

#if defined(__AVX512BF16__)
typedef std::uint16_t ManyHalves __attribute__((vector_size(kRegisterBytes), aligned(2), may_alias));

/// Sixteen floats, rounded to bfloat16 in the lower halves of as many words.
NRL_INLINE_MEMBER Register<std::uint32_t> lower_halves(Register<float> x) {
  return reinterpret_cast<Register<std::uint32_t>>(
      _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x))));
}
/// Sixteen floats, rounded to bfloat16: eight words.
NRL_INLINE_MEMBER void store_rounded(std::uint32_t* p, Register<float> v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
}
NRL_INLINE_MEMBER void move_vector(const bfloat16* from, bfloat16* to) {
  *reinterpret_cast<UnalignedHalves*>(to) = *reinterpret_cast<const UnalignedHalves*>(from);
}
/// Sixteen consecutive words of two rows of bfloat16: `first` in the lower halves.
NRL_INLINE_MEMBER Register<std::uint32_t> join(const bfloat16* first, const bfloat16* second) {
  const auto words = [](const bfloat16* p) {
    return __builtin_convertvector(*reinterpret_cast<const UnalignedHalves*>(p), Register<std::uint32_t>);
  };
  return words(first) | words(second) << 16;
}
#endif

/// Terms of a sum in one word.
template <class Word>
constexpr int terms_in = std::is_same_v<Word, std::uint32_t> ? 2 : 1;

template <class Elem>
using WordVec = decltype(load(static_cast<const Elem*>(nullptr)));

/// Rows of words as they lie in memory: row i is what the i-th step of a sum multiplies, its columns are the lanes.
/// Numbers are widened on the way.
template <class Elem>
struct WordRows {
  using Vec = WordVec<Elem>;
  const Elem* data;
  std::int64_t stride;

  template <int L>
  NRL_INLINE_MEMBER void words(std::int64_t i, std::int64_t column, Vec (&to)[L]) const {
#pragma GCC unroll 8
    for (int l = 0; l < L; ++l)
      to[l] = load(data + i * stride + column + l * static_cast<int>(sizeof(Vec) / sizeof(to[0][0])));
  }
  /// One vector of which only the first n lanes exist.
  NRL_INLINE_MEMBER Vec partial(std::int64_t i, std::int64_t column, int n) const {
    return load(data + i * stride + column, n);
  }
  WordRows from(std::int64_t column) const { return {data + column, stride}; }
};

#if defined(__AVX512BF16__)
/// Rows of bfloat16 in the cache, which become rows of pairs on the way: rows 2i and 2i + 1 are word row i.
struct JoinedRows {
  using Vec = Register<std::uint32_t>;
  const bfloat16* data;
  std::int64_t stride;

  template <int L>
  NRL_INLINE_MEMBER void words(std::int64_t i, std::int64_t column, Vec (&to)[L]) const {
    const bfloat16 *first = data + 2 * i * stride + column, *second = first + stride;
    if constexpr (L % 2 == 0) {
      constexpr auto lanes = std::make_integer_sequence<int, 32>{};
#pragma GCC unroll 4
      for (int l = 0; l < L; l += 2) {
        const auto a = *reinterpret_cast<const ManyHalves*>(first + 16 * l),
                   b = *reinterpret_cast<const ManyHalves*>(second + 16 * l);
        to[l] = interleave<0>(a, b, lanes);
        to[l + 1] = interleave<16>(a, b, lanes);
      }
    } else {
#pragma GCC unroll 4
      for (int l = 0; l < L; ++l) to[l] = join(first + 16 * l, second + 16 * l);
    }
  }
  NRL_INLINE_MEMBER Vec partial(std::int64_t i, std::int64_t column, int n) const {
    bfloat16 lanes[2][16] = {};
    for (int row = 0; row < 2; ++row)
      std::memcpy(static_cast<void*>(lanes[row]), data + (2 * i + row) * stride + column, n * sizeof(bfloat16));
    return join(lanes[0], lanes[1]);
  }
  JoinedRows from(std::int64_t column) const { return {data + column, stride}; }

 private:
  /// Elements [First, First + 16) of a and b, alternating.
  template <int First, int... I>
  static NRL_INLINE_MEMBER Vec interleave(ManyHalves a, ManyHalves b, std::integer_sequence<int, I...>) {
    using Halves = std::uint16_t __attribute__((vector_size(kRegisterBytes)));
    return reinterpret_cast<Vec>(
        shuffled<Halves, (First + I / 2 + I % 2 * 32)...>(static_cast<Halves>(a), static_cast<Halves>(b)));
  }
};
#endif

/// What tiles in the cache are read by: numbers as they are, or pairs joined on the way.
template <class Elem>
struct CacheRowsOf {
  using type = WordRows<Elem>;
};
#if defined(__AVX512BF16__)
template <>
struct CacheRowsOf<bfloat16> {
  using type = JoinedRows;
};
#endif

/// f(element of that type).
template <class F>
NRL_INLINE_MEMBER auto with_element(ElementType type, const F& f) {
  switch (type) {
    case ElementType::float32:
      return f(float{});
    case ElementType::bfloat16:
      return f(bfloat16{});
    case ElementType::float64:
      break;
  }
  return f(double{});
}

}  // namespace
}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
