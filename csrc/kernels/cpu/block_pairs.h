// Weights in blocks as pairs of bfloat16 in registers, with rows of w in the lanes: for products of few rows of x
// (block_rows.h).
//
// q8_0 and nf4: a 32-bit lane of the codes of a tile holds codes of the even or of the odd terms of a row. A code of
// q8_0 is put into the mantissa of a float. A multiply-add takes away what is not the code: 1 + code · 2^-n, times
// scale · 2^n, minus scale · (2^n + zero) is scale · (code - zero). All of that is exact, but that a weight of zero has
// no sign here, and infinite scales give no number. The sums that this could change are zero or not finite. They are
// formed again from unpacked weights. The codes of nf4 are looked up.
//
// q4_0: a weight is ± 2^-h · 8 · odd · |scale| in bfloat16, with odd 1, 3, 5 or 7 and h from 0 to 3, or 0. Rounding
// commutes with 2^-h, so the bits of the four -8 · odd · |scale| of sixteen rows, 64 numbers in two registers, give all
// weights: h · 2^7 is subtracted from the exponent, 2^15 where the weight is positive, and more than there is, with
// saturation at 0, where the weight is 0. Sums have the sign of their row's scale while the block is added. As above,
// sums that are zero or not finite are formed again.
#pragma once
#include "kernels/cpu/block_weights.h"
#include "kernels/cpu/packed_strip.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX512BF16__)
constexpr int kBlockWords = static_cast<int>(kBlockTerms) / 2;

/// A tile word by word: word<i>() are terms 2 i and 2 i + 1 of all rows.
template <BlockFormat kFormat>
class BlockWords {
 public:
  [[gnu::always_inline]] void read(const std::byte* tile) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 4
      for (int i = 0; i < kCodes; ++i)
        codes_[half][i] = _mm512_loadu_si512(tile + kBlockTileRows * scale_bytes(kFormat) + 64 * (kCodes * half + i));
      factors_[half] = scales_of(tile, half);
      if constexpr (!kNormal) {
        minus_[half] = _mm512_mul_ps(factors_[half], _mm512_set1_ps(-(kUnit + 128)));
        factors_[half] = _mm512_mul_ps(factors_[half], _mm512_set1_ps(kUnit));
      }
    }
  }

  template <int kWord>
  [[gnu::always_inline]] __m512i word() const {
    return rounded(weights<kWord>(0), weights<kWord>(1));
  }

 private:
  static constexpr bool kNormal = kFormat == BlockFormat::nf4;
  static constexpr int kCodes = kNormal ? 2 : 4;  ///< registers for eight rows
  static constexpr float kUnit = 1 << 15;         ///< of a code in a mantissa, from bit 8 on

  /// The scales of eight rows, each twice.
  [[gnu::always_inline]] static __m512 scales_of(const std::byte* tile, int half) {
    if constexpr (kNormal)
      return _mm512_permutexvar_ps(
          _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
          _mm512_castps256_ps512(_mm256_loadu_ps(reinterpret_cast<const float*>(tile) + 8 * half)));
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile) + half);
    return _mm512_cvtph_ps(_mm256_set_m128i(_mm_unpackhi_epi16(bits, bits), _mm_unpacklo_epi16(bits, bits)));
  }

  /// The two terms of eight rows.
  template <int kWord>
  [[gnu::always_inline]] __m512 weights(int half) const {
    constexpr int kByte = kWord % 4, kShift = kNormal ? 8 * kByte + kWord / 8 * 4 : 8 * (kByte - 1);
    __m512i codes = codes_[half][kNormal ? kWord / 4 % 2 : kWord / 4];
    if constexpr (kShift < 0) codes = _mm512_slli_epi32(codes, -kShift);
    if constexpr (kShift > 0) codes = _mm512_srli_epi32(codes, kShift);
    if constexpr (kNormal)  // a look-up takes four bits
      return _mm512_mul_ps(_mm512_permutexvar_ps(codes, _mm512_loadu_ps(kNormalFloat)), factors_[half]);
    const __m512i bits =  // codes & mask ^ one; a signed code becomes one above 128
        _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(0xff00), _mm512_set1_epi32(0x3f808000), 0x6a);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(bits), factors_[half], minus_[half]);
  }

  __m512i codes_[2][kCodes];
  __m512 factors_[2], minus_[2];
};

/// What is subtracted for code q of q4_0, twice one after the other: a look-up takes five bits. Bits 4 and 5 tell which
/// of the four numbers it is subtracted from, and are added to these.
struct Subtrahends {
  alignas(64) std::uint16_t of[32];
  constexpr Subtrahends() : of() {
    for (unsigned i = 0; i < 32; ++i) {
      const unsigned q = i % 16;
      unsigned odd = q < 8 ? 8 - q : q - 8, halvings = 3;
      for (; odd > 1 && odd % 2 == 0; odd /= 2) --halvings;
      of[i] = static_cast<std::uint16_t>(odd == 0 ? 0xffff : (q > 8 ? 0x8000 : 0) + (halvings << 7) + (odd / 2 << 4));
    }
  }
};
constexpr Subtrahends kSubtrahends;

template <>
class BlockWords<BlockFormat::q4_0> {
 public:
  [[gnu::always_inline]] void read(const std::byte* tile) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      codes_[i] = _mm512_loadu_si512(tile + kBlockTileRows * scale_bytes(BlockFormat::q4_0) + 64 * i);
    const __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(tile)));
    signs_changed_ = _mm512_ternarylogic_epi32(_mm512_castps_si512(scales), _mm512_castps_si512(scales_),
                                               _mm512_set1_epi32(kSign), 0x28);  // (new ^ old) & sign
    scales_ = scales;
    not_finite_ = _mm512_fmadd_ps(scales, _mm512_setzero_ps(), not_finite_);
    const __m512 magnitudes = _mm512_abs_ps(scales);
    const auto minus = [&](float odd) __attribute__((always_inline)) {  // 0 - 0 is 0, not -0
      return _mm512_fnmadd_ps(magnitudes, _mm512_set1_ps(8 * odd), _mm512_setzero_ps());
    };
    const __m512i of_second = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(16), 1);
    numbers_[0] = _mm512_add_epi16(rounded(minus(1), minus(3)), of_second);
    numbers_[1] = _mm512_add_epi16(rounded(minus(5), minus(7)), _mm512_or_si512(of_second, _mm512_set1_epi16(32)));
  }

  /// The sums of the blocks before this one, with the signs of its scales.
  template <class V>
  [[gnu::always_inline]] V signed_as_this(V sums) const {
    return __builtin_bit_cast(V, _mm512_xor_si512(__builtin_bit_cast(__m512i, sums), signs_changed_));
  }
  /// The sums of all blocks, with their own signs; NaN where a scale was not finite.
  template <class V>
  [[gnu::always_inline]] V whole(V sums) const {
    const __m512i signs = _mm512_and_si512(_mm512_castps_si512(scales_), _mm512_set1_epi32(kSign));
    const __m512i each = _mm512_xor_si512(__builtin_bit_cast(__m512i, sums), signs);
    return __builtin_bit_cast(V, _mm512_add_ps(_mm512_castsi512_ps(each), not_finite_));
  }

  template <int kWord>
  [[gnu::always_inline]] __m512i word() const {
    constexpr int kShift = kWord % 2 * 8 + kWord / 8 * 4;
    __m512i codes = codes_[kWord % 8 / 2];
    if constexpr (kShift > 0) codes = _mm512_srli_epi16(codes, kShift);
    const __m512i rows = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5,
                                          4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
    const __m512i less = _mm512_permutexvar_epi16(codes, _mm512_load_si512(kSubtrahends.of));
    return _mm512_subs_epu16(_mm512_permutex2var_epi16(numbers_[0], _mm512_or_si512(less, rows), numbers_[1]), less);
  }

 private:
  static constexpr int kSign = -0x7fffffff - 1;

  __m512i codes_[4];    ///< a 32-bit lane for each row: terms 4 i to 4 i + 3 and those 16 places after them
  __m512i numbers_[2];  ///< -8 · odd · |scale| of the rows: odd 1, then 3; 5, then 7
  __m512i signs_changed_;
  __m512 scales_ = _mm512_setzero_ps(), not_finite_ = _mm512_setzero_ps();
};

/// Groups of 16 rows of w at a time: sums enough that none waits for its last term.
template <BlockFormat kFormat, int kRows>
constexpr int kGroupsAtOnce = kRows <= 2 ? 3 : 1;

/// sums[r][width] = kGroups times 16 rows of w, whose tiles follow rows[group], times kRows rows of packed x.
template <BlockFormat kFormat, int kRows, int kGroups>
[[gnu::noinline]] void multiply_groups(const LinearInput<bfloat16>& p, const std::byte* const* rows, std::int64_t ahead,
                                       float* sums, std::int64_t width) {
  using X = Terms<bfloat16>;
  constexpr std::int64_t kBytes = block_tile_bytes(kFormat);
  X::V chains[kGroups][kRows];
  for (auto& group : chains)
    for (auto& chain : group) chain = X::V{};
  StripRows<false> x(p);
  BlockWords<kFormat> words[kGroups];
  const std::int64_t end = p.K / kBlockTerms * kBytes;
  for (std::int64_t offset = 0; offset < end; offset += kBytes) {
#pragma GCC unroll 3
    for (int g = 0; g < kGroups; ++g) {
      ask_for<kFormat>(rows[g] + offset + ahead);
      words[g].read(rows[g] + offset);
      if constexpr (kFormat == BlockFormat::q4_0)
        for (auto& chain : chains[g]) chain = words[g].signed_as_this(chain);
    }
    [&]<int... kWord>(std::integer_sequence<int, kWord...>) __attribute__((always_inline)) {
      const auto add = [&]<int kEach>() __attribute__((always_inline)) {
#pragma GCC unroll 3
        for (int g = 0; g < kGroups; ++g) {
          const __m512i word = words[g].template word<kEach>();
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) chains[g][r] = x.add((PackedBits)word, r, chains[g][r]);
        }
        x.next_word();
      };
      (add.template operator()<kWord>(), ...);
    }(std::make_integer_sequence<int, kBlockWords>());
  }
  for (int r = 0; r < kRows; ++r)
    for (int g = 0; g < kGroups; ++g) {
      if constexpr (kFormat == BlockFormat::q4_0) chains[g][r] = words[g].whole(chains[g][r]);
      store(sums + r * width + g * kBlockTileRows, chains[g][r]);
    }
}
#endif

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
