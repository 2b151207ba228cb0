// Weights in blocks as floats in registers, a term at a time, with rows of w in the lanes: for products of few rows of
// x (block_rows.h) by a processor that has no products of pairs.
//
// q8_0 and q4_0: a 32-bit lane holds codes of four terms of a row. Each in turn is shuffled to the top of its lane,
// with zeros below: a whole number, which times scale · 2^-24 is a weight of at most 19 bits. The codes of nf4 are
// looked up.
#pragma once
#include "kernels/cpu/block_weights.h"
#include "kernels/cpu/linear_panel.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kTermLanes = kRegisterLanes<float>;  ///< rows of w
constexpr int kTileHalves = static_cast<int>(kBlockTileRows) / kTermLanes;
constexpr int kTermSteps = 4, kStepTerms = static_cast<int>(kBlockTerms) / kTermSteps;

/// Byte kByte of every 32-bit lane at its top, with zeros below.
template <int kByte>
constexpr ByteOrder kLaneTop([](int i) { return i % 4 == 3 ? i % 16 - 3 + kByte : kZeroByte; });

/// The weights of half the rows of a tile.
template <BlockFormat kFormat>
class BlockTerms {
 public:
  [[gnu::always_inline]] void read(const std::byte* tile, int half) {
    codes_ = tile + kBlockTileRows * scale_bytes(kFormat) + half * kHalfBytes;
    if constexpr (kNormal) scales_ = _mm256_loadu_ps(reinterpret_cast<const float*>(tile) + half * kTermLanes);
    else
      scales_ = _mm256_mul_ps(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile) + half)),
                              _mm256_set1_ps(kLanesOfRows ? 0x1p-28f : 0x1p-24f));
    scales_ = rows_in_lanes(scales_);
  }

  /// The codes of terms 8 step to 8 step + 7, in two registers.
  [[gnu::always_inline]] void step(int step, __m256i (&codes)[2]) const {
    const int run = kFormat == BlockFormat::q8_0 ? step : kLanesOfRows ? step % 2 * 2 : step % 2;
    const std::byte* const at = codes_ + 64 * run;
    if constexpr (kLanesOfRows) {
      for (int i = 0; i < 2; ++i) {  // (code - 8) · 16 as a signed byte
        const __m256i both = _mm256_xor_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at + 64 * i)),
                                              _mm256_set1_epi8(static_cast<char>(0x88)));
        codes[i] = _mm256_and_si256(step < kTermSteps / 2 ? _mm256_slli_epi16(both, 4) : both,
                                    _mm256_set1_epi8(static_cast<char>(0xf0)));
      }
    } else {
      const __m256 low = _mm256_loadu_ps(reinterpret_cast<const float*>(at)),
                   high = _mm256_loadu_ps(reinterpret_cast<const float*>(at + 32));
      codes[0] = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88));
      codes[1] = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd));
      if (kNormal && step >= kTermSteps / 2)
        codes[0] = _mm256_srli_epi32(codes[0], 4), codes[1] = _mm256_srli_epi32(codes[1], 4);
    }
  }
  /// Term kTerm of a step.
  template <int kTerm>
  [[gnu::always_inline]] __m256 weight(const __m256i (&codes)[2]) const {
    constexpr int kPlace = kLanesOfRows ? joined_place<BlockFormat::q4_0>(kTerm % 4) : kTerm / 2;
    const __m256i of = codes[kLanesOfRows ? kTerm / 4 : kTerm % 2];
    if constexpr (kNormal)
      return _mm256_mul_ps(normal_floats(_mm256_srli_epi32(of, 8 * kPlace), _mm256_loadu_ps(kNormalFloat),
                                         _mm256_loadu_ps(kNormalFloat + 8)),
                           scales_);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(kLaneTop<kPlace>(of)), scales_);
  }
  /// out[term][16] = all terms.
  [[gnu::always_inline]] void put(float* out) const {
#pragma GCC unroll 4
    for (int each = 0; each < kTermSteps; ++each) {
      __m256i codes[2];
      step(each, codes);
      [&]<int... kTerm>(std::integer_sequence<int, kTerm...>) __attribute__((always_inline)) {
        (_mm256_store_ps(out + (each * kStepTerms + kTerm) * kBlockTileRows, weight<kTerm>(codes)), ...);
      }(std::make_integer_sequence<int, kStepTerms>());
    }
  }
  /// step() leaves rows 2 and 3 and rows 4 and 5 exchanged where a row has 64 bits, and this undoes it.
  [[gnu::always_inline]] static __m256 rows_in_lanes(__m256 rows) {
    if constexpr (kLanesOfRows) return rows;
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(rows), 0xd8));
  }

 private:
  static constexpr bool kLanesOfRows = kFormat == BlockFormat::q4_0, kNormal = kFormat == BlockFormat::nf4;
  static constexpr std::int64_t kHalfBytes =
      kLanesOfRows ? 32 : kTermLanes * (block_bytes(kFormat) - scale_bytes(kFormat));

  const std::byte* codes_;
  __m256 scales_;
};

/// sums[r][width] = kHalves halves, from `first` on, of kTiles times 16 rows of w, whose tiles follow rows[tile], times
/// kRows rows of packed x.
template <BlockFormat kFormat, int kRows, int kTiles, int kHalves>
[[gnu::noinline]] void multiply_halves(const LinearInput<bfloat16>& p, const std::byte* const* rows, int first,
                                       std::int64_t ahead, float* sums, std::int64_t width) {
  constexpr int kParts = kTiles * kHalves;
  __m256 chains[kRows][kParts];
  for (auto& row : chains)
    for (auto& chain : row) chain = _mm256_setzero_ps();
  const auto* x = static_cast<const float*>(p.packed);
  const std::int64_t row_step = packed_row_words<bfloat16>(p.K), end = block_row_bytes(kFormat, p.K) * kBlockTileRows;
  BlockTerms<kFormat> terms[kParts];
  for (std::int64_t offset = 0; offset < end; offset += block_tile_bytes(kFormat)) {
    for (int i = 0; i < kParts; ++i) {
      const std::byte* const tile = rows[i / kHalves] + offset;
      if (first + i % kHalves == 0) ask_for<kFormat>(tile + ahead);
      terms[i].read(tile, first + i % kHalves);
    }
#pragma GCC unroll 4
    for (int step = 0; step < kTermSteps; ++step, x += kStepTerms) {
      __m256i codes[kParts][2];
      for (int i = 0; i < kParts; ++i) terms[i].step(step, codes[i]);
      [&]<int... kTerm>(std::integer_sequence<int, kTerm...>) __attribute__((always_inline)) {
        const auto add = [&]<int kEach>() __attribute__((always_inline)) {
          for (int i = 0; i < kParts; ++i) {
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
    for (int i = 0; i < kParts; ++i)
      _mm256_storeu_ps(sums + r * width + i / kHalves * kBlockTileRows + (first + i % kHalves) * kTermLanes,
                       BlockTerms<kFormat>::rows_in_lanes(chains[r][i]));
}

/// sums[r][width] = kGroups times 16 rows of w, whose tiles follow rows[group], times kRows rows of packed x.
template <BlockFormat kFormat, int kRows, int kGroups>
void multiply_groups(const LinearInput<bfloat16>& p, const std::byte* const* rows, std::int64_t ahead, float* sums,
                     std::int64_t width) {
  // Sums enough that none waits for its last term, and no more than fit into registers. Both halves of a tile of q4_0
  // are in the same cache lines, so that memory is still read once and in order.
  constexpr bool kOneHalf = kRows > 4 || (kRows == 1 && kFormat == BlockFormat::q4_0);
  constexpr int kTiles = kRows == 1 && kOneHalf ? kGroups : 1, kHalves = kOneHalf ? 1 : kTileHalves;
  for (int g = 0; g < kGroups; g += kTiles)
    for (int half = 0; half < kTileHalves; half += kHalves)
      multiply_halves<kFormat, kRows, kTiles, kHalves>(p, rows + g, half, ahead, sums + g * kBlockTileRows, width);
}

/// sums[r][width], 16 of a row, = or += `terms` terms of kRows rows of packed x times w[term][16].
template <int kRows>
[[gnu::noinline]] void add_terms(const float* x, std::int64_t step, const float* w, std::int64_t terms, bool goes_on,
                                 float* sums, std::int64_t width) {
  __m256 chains[kRows][kTileHalves];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    chains[r][0] = goes_on ? _mm256_loadu_ps(sums + r * width) : _mm256_setzero_ps();
    chains[r][1] = goes_on ? _mm256_loadu_ps(sums + r * width + kTermLanes) : _mm256_setzero_ps();
  }
  for (std::int64_t k = 0; k < terms; ++k, x += step, w += kBlockTileRows) {
    const __m256 low = _mm256_load_ps(w), high = _mm256_load_ps(w + kTermLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const __m256 each = _mm256_broadcast_ss(x + r);
      chains[r][0] = _mm256_fmadd_ps(low, each, chains[r][0]);
      chains[r][1] = _mm256_fmadd_ps(high, each, chains[r][1]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    _mm256_storeu_ps(sums + r * width, chains[r][0]);
    _mm256_storeu_ps(sums + r * width + kTermLanes, chains[r][1]);
  }
}

/// sums[r][width] = 16 rows of w times more rows of packed x, which lie side by side in panels: these share the weights
/// of some terms at a time, which stay in the nearest cache.
template <BlockFormat kFormat>
[[gnu::noinline]] void multiply_panels(const LinearInput<bfloat16>& p, const std::byte* tiles, std::int64_t ahead,
                                       float* sums, std::int64_t width) {
  constexpr std::int64_t kTerms = 2 * kBlockTerms, kPanel = kPanelRows<bfloat16>, kGroup = 6;
  alignas(64) float w[kTerms * kBlockTileRows];
  BlockTerms<kFormat> halves[kTileHalves];
  for (std::int64_t k = 0; k < p.K; k += kTerms) {
    const std::int64_t terms = smaller(p.K - k, kTerms);
    for (std::int64_t block = 0; block < terms / kBlockTerms; ++block, tiles += block_tile_bytes(kFormat)) {
      ask_for<kFormat>(tiles + ahead);
      for (int half = 0; half < kTileHalves; ++half) {
        halves[half].read(tiles, half);
        halves[half].put(w + block * kBlockTerms * kBlockTileRows + half * kTermLanes);
      }
    }
    for (std::int64_t m = 0; m < p.M; m += kPanel) {
      const std::int64_t rows = smaller(p.M - m, kPanel), step = (rows + kTermLanes - 1) / kTermLanes * kTermLanes;
      const float* const x = static_cast<const float*>(p.packed) + m * p.K + k * step;
      for (std::int64_t r = 0, taken; r < rows; r += taken) {
        const std::int64_t left = rows - r, groups = (left + kGroup - 1) / kGroup;
        taken = (left + groups - 1) / groups;  // groups of nearly one size
        with_constant<kGroup>(static_cast<int>(taken), [&](auto n) {
          add_terms<n()>(x + r, step, w, terms, k > 0, sums + (m + r) * width, width);
        });
      }
    }
  }
  for (std::int64_t m = 0; m < p.M; ++m)
    for (int half = 0; half < kTileHalves; ++half) {
      float* const at = sums + m * width + half * kTermLanes;
      _mm256_storeu_ps(at, BlockTerms<kFormat>::rows_in_lanes(_mm256_loadu_ps(at)));
    }
}
#endif

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
