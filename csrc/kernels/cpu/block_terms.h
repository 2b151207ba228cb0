// Weights of nf4 as floats in registers, a term at a time, with rows of w in the lanes: for products of few rows of x
// (block_rows.h) by a processor that has no products of pairs. The codes are looked up. Those of q8_0 and q4_0 are
// multiplied as they are (block_codes.h).
#pragma once
#include "kernels/cpu/block_codes.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kTermLanes = kRegisterLanes<float>;  ///< rows of w
constexpr int kTileHalves = static_cast<int>(kBlockTileRows) / kTermLanes;
constexpr int kTermSteps = 4, kStepTerms = static_cast<int>(kBlockTerms) / kTermSteps;

/// The weights of half the rows of a tile.
class BlockTerms {
 public:
  [[gnu::always_inline]] void read(const std::byte* tile, int half) {
    constexpr std::int64_t kScales = scale_bytes(BlockFormat::nf4), kCodes = block_bytes(BlockFormat::nf4) - kScales;
    codes_ = tile + kBlockTileRows * kScales + half * kTermLanes * kCodes;
    scales_ = rows_in_lanes(_mm256_loadu_ps(reinterpret_cast<const float*>(tile) + half * kTermLanes));
  }

  /// The codes of terms 8 step to 8 step + 7, in two registers.
  [[gnu::always_inline]] void step(int step, __m256i (&codes)[2]) const {
    const std::byte* const at = codes_ + 64 * (step % 2);
    const __m256 low = _mm256_loadu_ps(reinterpret_cast<const float*>(at)),
                 high = _mm256_loadu_ps(reinterpret_cast<const float*>(at + 32));
    codes[0] = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88));
    codes[1] = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd));
    if (step >= kTermSteps / 2) codes[0] = _mm256_srli_epi32(codes[0], 4), codes[1] = _mm256_srli_epi32(codes[1], 4);
  }
  /// Term kTerm of a step.
  template <int kTerm>
  [[gnu::always_inline]] __m256 weight(const __m256i (&codes)[2]) const {
    return _mm256_mul_ps(normal_floats(_mm256_srli_epi32(codes[kTerm % 2], 8 * (kTerm / 2)),
                                       _mm256_loadu_ps(kNormalFloat), _mm256_loadu_ps(kNormalFloat + 8)),
                         scales_);
  }
  /// step() leaves rows 2 and 3 and rows 4 and 5 exchanged, and this undoes it.
  [[gnu::always_inline]] static __m256 rows_in_lanes(__m256 rows) {
    return BlockCodes<BlockFormat::q8_0>::rows_in_lanes(rows);
  }

 private:
  const std::byte* codes_;
  __m256 scales_;
};

/// sums[r][width] = kHalves halves, from `first` on, of 16 rows of w times kRows rows of packed x.
template <int kRows, int kHalves>
[[gnu::noinline]] void multiply_terms(const LinearInput<bfloat16>& p, const std::byte* tile, int first,
                                      std::int64_t ahead, float* sums, std::int64_t width) {
  __m256 chains[kRows][kHalves];
  for (auto& row : chains)
    for (auto& chain : row) chain = _mm256_setzero_ps();
  const auto* x = static_cast<const float*>(p.packed);
  const std::int64_t row_step = packed_row_words<bfloat16>(p.K);
  BlockTerms terms[kHalves];
  for (std::int64_t block = 0; block < p.K / kBlockTerms; ++block, tile += block_tile_bytes(BlockFormat::nf4)) {
    if (first == 0) ask_for<BlockFormat::nf4>(tile + ahead);
    for (int i = 0; i < kHalves; ++i) terms[i].read(tile, first + i);
#pragma GCC unroll 4
    for (int step = 0; step < kTermSteps; ++step, x += kStepTerms) {
      __m256i codes[kHalves][2];
      for (int i = 0; i < kHalves; ++i) terms[i].step(step, codes[i]);
      [&]<int... kTerm>(std::integer_sequence<int, kTerm...>) __attribute__((always_inline)) {
        const auto add = [&]<int kEach>() __attribute__((always_inline)) {
          for (int i = 0; i < kHalves; ++i) {
            const __m256 weights = terms[i].template weight<kEach>(codes[i]);
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r)
              chains[r][i] = _mm256_fmadd_ps(weights, _mm256_broadcast_ss(x + r * row_step + kEach), chains[r][i]);
          }
        };
        (add.template operator()<kTerm>(), ...);
      }(std::make_integer_sequence<int, kStepTerms>());
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kHalves; ++i)
      _mm256_storeu_ps(sums + r * width + (first + i) * kTermLanes, BlockTerms::rows_in_lanes(chains[r][i]));
}

/// Groups of 16 rows of w at a time; kRows 0: of more rows of x than few.
template <BlockFormat kFormat, int kRows>
constexpr int kGroupsAtOnce = kRows == 1 || (kFormat == BlockFormat::q4_0 && kRows > 0 && kRows < 4) ? 3 : 1;

/// sums[r][width] = kGroups times 16 rows of w, whose tiles follow rows[group], times kRows rows of packed x.
template <BlockFormat kFormat, int kRows, int kGroups>
void multiply_groups(const LinearInput<bfloat16>& p, const std::byte* const* rows, std::int64_t ahead, float* sums,
                     std::int64_t width) {
  // Sums enough that none waits for its last term, and no more than fit into registers. Both halves of a tile of q4_0
  // are in the same cache lines, so that memory is still read once and in order.
  constexpr bool kNormal = kFormat == BlockFormat::nf4;
  constexpr int kHalves = kRows > 4 || (!kNormal && kGroups * kRows > 3 && kGroups > 1) ? 1 : kTileHalves;
  for (int half = 0; half < kTileHalves; half += kHalves)
    if constexpr (kNormal)
      for (int g = 0; g < kGroups; ++g)
        multiply_terms<kRows, kHalves>(p, rows[g], half, ahead, sums + g * kBlockTileRows, width);
    else multiply_codes<kFormat, kRows, kGroups, kHalves>(p, rows, half, ahead, sums, width);
}
#endif

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
