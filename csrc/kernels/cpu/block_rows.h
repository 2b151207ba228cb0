// Products of few rows of x with weights in blocks that become pairs of bfloat16 in registers, with rows of w in the
// lanes, as in few_rows_tile. Unpacked rows would have to be stored, and turned when they are read again.
//
// Sixteen rows of a block: their codes are interleaved byte by byte, so that a 32-bit lane holds codes of the even or
// of the odd terms of a row, and each code is put into the mantissa of a float. A multiply-add takes away what is not
// the code: 1 + code · 2^-n, times scale · 2^n, minus scale · (2^n + zero) is scale · (code - zero). All of that is
// exact, but that a weight of zero has no sign here, and infinite scales give no number. The sums that this could
// change are zero or not finite. They are formed again from unpacked weights. The codes of nf4 are looked up.
#pragma once
#include "kernels/cpu/block_strips.h"
#include "kernels/cpu/block_weights.h"
#include "kernels/cpu/packed_strip.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX512BF16__)
constexpr std::int64_t kMostBlockRows = kLinearFewRows;  ///< of x
constexpr int kBlockGroup = 16;                          ///< rows of w
constexpr int kBlockGroups = static_cast<int>(kLinearTileN) / kBlockGroup;
constexpr int kBlockWords = static_cast<int>(kBlockTerms) / 2;

template <BlockFormat kFormat>
[[gnu::always_inline]] inline void unpack_block(const std::byte* block, bfloat16* out) {
  if constexpr (kFormat == BlockFormat::q8_0) unpack_q8_0(block, out);
  else unpack_halves<kFormat>(block, out);
}

/// One block of each of 16 rows, word by word: word<i>() are terms 2 i and 2 i + 1 of all rows.
template <BlockFormat kFormat>
class BlockWords {
 public:
  /// The blocks at rows[i] + offset.
  [[gnu::always_inline]] BlockWords(const std::byte* const* rows, std::int64_t offset) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const std::byte* const* const of = rows + 8 * half;
#pragma GCC unroll 2
      for (int part = 0; part < kParts; ++part) {
        const std::int64_t at = offset + kScaleBytes<kFormat> + 16 * part;
        const __m512i even = four(of, at), odd = four(of + 1, at);
        codes_[half][2 * part] = parted(_mm512_unpacklo_epi64(even, odd));
        codes_[half][2 * part + 1] = parted(_mm512_unpackhi_epi64(even, odd));
      }
      const __m512 scales = scales_of(of, offset);
      if constexpr (kNormal) {
        factors_[half][0] = scales;
        continue;
      }
#pragma GCC unroll 3
      for (int i = 0; i < kPlaces; ++i) {
        const auto unit = static_cast<float>(1 << (23 - bit_of(i)));
        factors_[half][i] = _mm512_mul_ps(scales, _mm512_set1_ps(unit));
        minus_[half][i] = _mm512_mul_ps(scales, _mm512_set1_ps(-(unit + kZero)));
      }
    }
  }

  template <int kWord>
  [[gnu::always_inline]] __m512i word() const {
    return rounded(weights<kWord>(0), weights<kWord>(1));
  }

 private:
  static constexpr bool kFour = kFormat != BlockFormat::q8_0, kNormal = kFormat == BlockFormat::nf4;
  static constexpr int kParts = kFour ? 1 : 2, kPlaces = kFour ? 3 : 1;  ///< of 16 bytes; of a code in a mantissa
  static constexpr float kZero = kFour ? 8 : 128;                        ///< the code of 0
  static constexpr int bit_of(int place) { return kFour ? 8 + 4 * place : 8; }

  /// 16 bytes of rows 0, 2, 4 and 6.
  [[gnu::always_inline]] static __m512i four(const std::byte* const* rows, std::int64_t at) {
    __m512i v = _mm512_castsi128_si512(sixteen_bytes(rows[0] + at));
    v = _mm512_mask_broadcast_i32x4(v, 0x00f0, sixteen_bytes(rows[2] + at));
    v = _mm512_mask_broadcast_i32x4(v, 0x0f00, sixteen_bytes(rows[4] + at));
    return _mm512_mask_broadcast_i32x4(v, 0xf000, sixteen_bytes(rows[6] + at));
  }
  /// Of every eight bytes first the even, then the odd ones.
  [[gnu::always_inline]] static __m512i parted(__m512i bytes) {
    return _mm512_shuffle_epi8(
        bytes, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)));
  }
  /// The scales of eight rows, each twice.
  [[gnu::always_inline]] static __m512 scales_of(const std::byte* const* rows, std::int64_t at) {
    if constexpr (kNormal) {
      const auto of = [&](int i) __attribute__((always_inline)) { return single_scale_of(rows[i] + at); };
      const __m256 scales = _mm256_setr_ps(of(0), of(1), of(2), of(3), of(4), of(5), of(6), of(7));
      return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                                   _mm512_castps256_ps512(scales));
    }
    __m128i bits = _mm_setzero_si128();
#define NRL_INSERT(i)                                           \
  {                                                             \
    std::uint16_t each;                                         \
    __builtin_memcpy(&each, rows[i] + at, sizeof(each));        \
    bits = _mm_insert_epi16(bits, static_cast<short>(each), i); \
  }
    NRL_INSERT(0)
    NRL_INSERT(1)
    NRL_INSERT(2)
    NRL_INSERT(3)
    NRL_INSERT(4)
    NRL_INSERT(5)
    NRL_INSERT(6)
    NRL_INSERT(7)
#undef NRL_INSERT
    return _mm512_cvtph_ps(_mm256_set_m128i(_mm_unpackhi_epi16(bits, bits), _mm_unpacklo_epi16(bits, bits)));
  }

  /// The two terms of eight rows.
  template <int kWord>
  [[gnu::always_inline]] __m512 weights(int half) const {
    constexpr int kByte = kWord % 4, kCode = 2 * kByte + kWord / 8;
    constexpr int kShift = kNormal ? 4 * kCode : !kFour ? 8 * (kByte - 1) : kCode < 2 ? -8 : kCode > 4 ? 12 : 0;
    constexpr int kPlace = !kFour ? 0 : kCode < 2 ? kCode : kCode > 4 ? kCode - 5 : kCode - 2;
    constexpr int kMask = (kFour ? 0xf : 0xff) << bit_of(kPlace), kOne = 0x3f800000;
    __m512i codes = codes_[half][kFour ? kWord / 4 % 2 : kWord / 4];
    if constexpr (kShift < 0) codes = _mm512_slli_epi32(codes, -kShift);
    if constexpr (kShift > 0) codes = _mm512_srli_epi32(codes, kShift);
    if constexpr (kNormal)  // a look-up takes four bits
      return _mm512_mul_ps(_mm512_permutexvar_ps(codes, _mm512_loadu_ps(kNormalFloat)), factors_[half][0]);
    const __m512i bits =  // codes & mask ^ one; a signed code becomes one above 128
        _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(kMask), _mm512_set1_epi32(kFour ? kOne : kOne | 0x8000),
                                  0x6a);
    return _mm512_fmadd_ps(_mm512_castsi512_ps(bits), factors_[half][kPlace], minus_[half][kPlace]);
  }

  __m512i codes_[2][2 * kParts];
  __m512 factors_[2][kPlaces], minus_[2][kPlaces];
};

/// The sums of 16 rows of w with one row of packed x: from unpacked weights.
template <BlockFormat kFormat>
[[gnu::noinline]] void unpacked_sums(const std::byte* const* rows, std::int64_t K, const float* x, float* sums) {
  using X = Terms<bfloat16>;
  bfloat16 terms[kBlockGroup][kBlockTerms];
  const bfloat16* at[kBlockGroup];
  for (int i = 0; i < kBlockGroup; ++i) at[i] = terms[i];
  X::V sum{};
  for (std::int64_t offset = 0; offset < block_row_bytes(kFormat, K); offset += block_bytes(kFormat)) {
    for (int i = 0; i < kBlockGroup; ++i) unpack_block<kFormat>(rows[i] + offset, terms[i]);
    for (std::int64_t k = 0; k < kBlockTerms; k += 2, ++x)
      sum = X::multiply_add(gathered<bfloat16>(at, k, kBlockTerms), X::V(*x), sum);
  }
  store(sums, sum);
}

/// Asks for memory, a little with every block.
struct BlocksAhead {
  const std::byte *asked, *ahead;
  [[gnu::always_inline]] void ask(std::int64_t bytes) {
    for (ahead += bytes; asked < ahead; asked += 64) __builtin_prefetch(asked, 0, 2);
  }
};

/// sums[r][width] = kGroups times 16 rows of w times kRows rows of packed x.
template <BlockFormat kFormat, int kRows, int kGroups>
[[gnu::noinline]] void multiply_groups(const LinearInput<bfloat16>& p, const std::byte* const* rows, BlocksAhead* ahead,
                                       float* sums, std::int64_t width) {
  using X = Terms<bfloat16>;
  constexpr std::int64_t kBytes = block_bytes(kFormat);
  X::V chains[kGroups][kRows];
  for (auto& group : chains)
    for (auto& chain : group) chain = X::V{};
  StripRows<false> block_x(p);
  const std::int64_t end = block_row_bytes(kFormat, p.K);
  for (std::int64_t offset = 0; offset < end; offset += kBytes) {
    if (ahead != nullptr) ahead->ask(kGroups * kBlockGroup * kBytes);
    auto x = block_x;
#pragma GCC unroll 3
    for (int g = 0; g < kGroups; ++g) {
      x = block_x;
      const BlockWords<kFormat> words(rows + g * kBlockGroup, offset);
      [&]<int... kWord>(std::integer_sequence<int, kWord...>) __attribute__((always_inline)) {
        const auto add = [&](__m512i word) __attribute__((always_inline)) {
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) chains[g][r] = x.add(word, r, chains[g][r]);
          x.next_word();
        };
        (add(words.template word<kWord>()), ...);
      }(std::make_integer_sequence<int, kBlockWords>());
    }
    block_x = x;
  }
  for (int r = 0; r < kRows; ++r)
    for (int g = 0; g < kGroups; ++g) store(sums + r * width + g * kBlockGroup, chains[g][r]);
}

/// sums[r][width] of a strip's 48 rows of w.
template <BlockFormat kFormat, int kRows>
void multiply_strip(const LinearInput<bfloat16>& p, const BlockStrip& strip, float* sums, std::int64_t width) {
  constexpr int kAtOnce = kRows <= 2 ? kBlockGroups : 1;  // chains enough that none waits for its last sum
  const std::int64_t row_bytes = block_row_bytes(kFormat, p.K);
  const std::byte* rows[kLinearTileN];
  for (std::int64_t i = 0; i < kLinearTileN; ++i) rows[i] = strip.rows + smaller(i, strip.have - 1) * row_bytes;
  BlocksAhead ahead{strip.rows + kLinearTileN * row_bytes, strip.rows + kLinearTileN * row_bytes};
  const StripRows<false> x(p);
  for (int g = 0; g < kBlockGroups; g += kAtOnce)
    multiply_groups<kFormat, kRows, kAtOnce>(p, rows + g * kBlockGroup, strip.asks_ahead ? &ahead : nullptr,
                                             sums + g * kBlockGroup, width);
  constexpr int kZeroOrNotFinite = 0x9f;
  for (std::int64_t r = 0; r < p.M; ++r)
    for (int n = 0; n < static_cast<int>(kLinearTileN); n += kBlockGroup)
      if (_mm512_fpclass_ps_mask(_mm512_loadu_ps(sums + r * width + n), kZeroOrNotFinite) != 0)
        unpacked_sums<kFormat>(rows + n, p.K, x.at + r * x.row_step, sums + r * width + n);
}

/// Computes tiles of kStrips strips (kernels/cpu/block_strips.h).
template <int kStrips, class StripOf, class StoreOf>
void run_block_strips(const LinearInput<bfloat16>& p, BlockFormat format, std::int64_t begin, std::int64_t end,
                      const StripOf& strip_of, const StoreOf& store_of) {
  constexpr std::int64_t kWidth = kStrips * kLinearTileN;
  alignas(64) float sums[kMostBlockRows * kWidth];
  with_constant<kMostBlockRows>(static_cast<int>(p.M), [&](auto rows) {
    constexpr int kRows = rows();
    for (std::int64_t t = begin; t < end; ++t) {
      for (int i = 0; i < kStrips; ++i) {
        float* const out = sums + i * kLinearTileN;
        if (format == BlockFormat::q8_0) multiply_strip<BlockFormat::q8_0, kRows>(p, strip_of(t, i), out, kWidth);
        else if (format == BlockFormat::q4_0) multiply_strip<BlockFormat::q4_0, kRows>(p, strip_of(t, i), out, kWidth);
        else multiply_strip<BlockFormat::nf4, kRows>(p, strip_of(t, i), out, kWidth);
      }
      const auto store = store_of(t);
      for (std::int64_t m = 0; m < p.M; ++m) store(m, sums + m * kWidth);
    }
  });
}
#else
constexpr std::int64_t kMostBlockRows = 0;
/// Never called: block_product_rows says so.
template <int kStrips, class StripOf, class StoreOf>
void run_block_strips(const LinearInput<bfloat16>&, BlockFormat, std::int64_t, std::int64_t, const StripOf&,
                      const StoreOf&) {}
#endif

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
