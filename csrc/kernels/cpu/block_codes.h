// Products with blocks of q4_0 and q8_0 where the processor multiplies float32 only (AVX2): codes are multiplied as the
// whole numbers that they are, and the sum of a block by its scale. A block b of a row of w adds to the row's sum
//
//   scale_b · (-z · (x_0 + ... + x_31) + q_0 · x_0 + ... + q_31 · x_31)    q >= 0, z the code of 0: 8 or 128
//
// in one order for any number of rows of x (BlockCodes::term): a chain of multiply-adds within the block, then one from
// block to block. A weight takes three instructions so: a 32-bit lane has several codes of a row; one of them is masked
// where it lies, which is a power of two times its value, and becomes a float. x is divided by that when it is packed.
#pragma once
#include "kernels/cpu/block_weights.h"
#include "kernels/cpu/linear_panel.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kCodeLanes = kRegisterLanes<float>;  ///< rows of w
constexpr int kCodeHalves = static_cast<int>(kBlockTileRows) / kCodeLanes;
constexpr std::int64_t kCodeWords = kBlockTerms + 1;  ///< of a block of packed x: first -z times the sum of its terms
constexpr std::int64_t code_words(std::int64_t K) { return K / kBlockTerms * kCodeWords; }

/// Eight rows of a tile, in the lanes, and how their codes lie: in runs, of which a lane has so many places.
template <BlockFormat kFormat>
struct BlockCodes {
  static_assert(kFormat != BlockFormat::nf4);
  static constexpr bool kBytes = kFormat == BlockFormat::q8_0;
  static constexpr int kRuns = kBytes ? 8 : 4, kPlaces = static_cast<int>(kBlockTerms) / kRuns, kBits = 32 / kPlaces;
  static constexpr float kZero = kBytes ? 128 : 8;
  /// The term of a block whose code is at a place of a run.
  static constexpr int term(int run, int place) {
    if (kBytes) return run / 2 * 8 + run % 2 + 2 * place;
    return 4 * run + byte_at<BlockFormat::q4_0>(place / 2) + (place % 2 == 0 ? 0 : static_cast<int>(kHalfBlock));
  }

  const std::byte* tile;
  int half;
  [[gnu::always_inline]] __m256i run(int run) const {
    const std::byte* const codes = tile + kBlockTileRows * scale_bytes(kFormat);
    if constexpr (kBytes) {
      const auto* const at = reinterpret_cast<const float*>(codes + 256 * half + 64 * (run / 2));
      const __m256 low = _mm256_loadu_ps(at), high = _mm256_loadu_ps(at + 8);
      const __m256 both = run % 2 == 0 ? _mm256_shuffle_ps(low, high, 0x88) : _mm256_shuffle_ps(low, high, 0xdd);
      return _mm256_xor_si256(_mm256_castps_si256(both), _mm256_set1_epi8(static_cast<char>(0x80)));
    } else {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 64 * run + 32 * half));
    }
  }
  [[gnu::always_inline]] __m256 scales() const {
    return rows_in_lanes(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(tile) + half)));
  }
  /// run() exchanges rows 2 and 3 with rows 4 and 5 where a row has 64 bits, and this undoes it.
  [[gnu::always_inline]] static __m256 rows_in_lanes(__m256 rows) {
    if constexpr (!kBytes) return rows;
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(rows), 0xd8));
  }
  /// The codes at a place of a run, times 2^(kBits · place); the last, whose lane would be negative, as they are.
  template <int kPlace>
  [[gnu::always_inline]] static __m256 floats(__m256i run) {
    if constexpr (kPlace == kPlaces - 1) return _mm256_cvtepi32_ps(_mm256_srli_epi32(run, kBits * kPlace));
    else return _mm256_cvtepi32_ps(_mm256_and_si256(run, _mm256_set1_epi32(((1 << kBits) - 1) << kBits * kPlace)));
  }
  template <class F>
  [[gnu::always_inline]] static void for_places(const F& f) {
    [&]<int... kPlace>(std::integer_sequence<int, kPlace...>) __attribute__((always_inline)) {
      (f.template operator()<kPlace>(), ...);
    }(std::make_integer_sequence<int, kPlaces>());
  }
};

/// to[kCodeWords] = a block of a row of x.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline void pack_code_block(const bfloat16* x, float* to) {
  using Of = BlockCodes<kFormat>;
  static_assert(Of::kBytes ? Of::term(3, 2) == 13 : Of::term(0, 2) == 2 && Of::term(0, 4) == 1 && Of::term(0, 7) == 19);
  __m128 quarters[8], sum = _mm_setzero_ps();
  for (int i = 0; i < 8; ++i)
    quarters[i] = _mm_castsi128_ps(
        _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x + 4 * i))), 16));
  for (int i = 0; i < 4; ++i) sum = _mm_add_ps(sum, _mm_add_ps(quarters[i], quarters[i + 4]));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  *to++ = -Of::kZero * _mm_cvtss_f32(_mm_add_ss(sum, _mm_movehdup_ps(sum)));
  for (int i = 0; i < 4; ++i, to += 8)
    if constexpr (Of::kBytes) {
      const __m128 places = _mm_setr_ps(1, 0x1p-8f, 0x1p-16f, 1), low = quarters[2 * i], high = quarters[2 * i + 1];
      _mm_storeu_ps(to, _mm_mul_ps(_mm_shuffle_ps(low, high, 0x88), places));
      _mm_storeu_ps(to + 4, _mm_mul_ps(_mm_shuffle_ps(low, high, 0xdd), places));
    } else {
      const __m128 first = _mm_setr_ps(1, 0x1p-4f, 0x1p-8f, 0x1p-12f),
                   last = _mm_setr_ps(0x1p-16f, 0x1p-20f, 0x1p-24f, 1);
      const __m128 even = _mm_unpacklo_ps(quarters[i], quarters[i + 4]),
                   odd = _mm_unpackhi_ps(quarters[i], quarters[i + 4]);
      _mm_storeu_ps(to, _mm_mul_ps(_mm_movelh_ps(even, odd), first));
      _mm_storeu_ps(to + 4, _mm_mul_ps(_mm_movehl_ps(odd, even), last));
    }
}

/// Packs rows of x one after the other, if they are few, or side by side in panels, as linear_pack does.
template <BlockFormat kFormat>
void pack_codes(const LinearInput<bfloat16>& p, std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kPanel = kPanelRows<bfloat16>;
  using V = ShortVec<float>;
  auto* const packed = static_cast<float*>(p.packed);
  const std::int64_t words = code_words(p.K), blocks = p.K / kBlockTerms;
  if (p.M <= kLinearFewRows) {
    for (std::int64_t m = 0; m < p.M; ++m)
      for (std::int64_t b = 0; b < blocks; ++b)
        pack_code_block<kFormat>(p.x + m * p.ldx + b * kBlockTerms, packed + m * words + b * kCodeWords);
    return;
  }
  for (std::int64_t m = begin * kLinearTileM, last = smaller(end * kLinearTileM, p.M); m < last; m += kPanel) {
    const std::int64_t rows = smaller(last - m, kPanel), step = (rows + kCodeLanes - 1) / kCodeLanes * kCodeLanes;
    for (std::int64_t r = 0; r < rows; r += kCodeLanes)
      for (std::int64_t b = 0; b < blocks; ++b) {
        float turned[kCodeLanes][(kCodeWords + kCodeLanes - 1) / kCodeLanes * kCodeLanes] = {};
        for (std::int64_t i = 0; i < smaller<std::int64_t>(rows - r, kCodeLanes); ++i)
          pack_code_block<kFormat>(p.x + (m + r + i) * p.ldx + b * kBlockTerms, turned[i]);
        float* const to = packed + m * words + b * kCodeWords * step + r;
        for (std::int64_t k = 0; k < kCodeWords; k += kCodeLanes) {
          V square[kCodeLanes];
          for (int i = 0; i < kCodeLanes; ++i) square[i] = load<V>(turned[i] + k);
          transpose(square);
          for (std::int64_t i = 0; i < smaller<std::int64_t>(kCodeWords - k, kCodeLanes); ++i)
            store(to + (k + i) * step, square[i]);
        }
      }
  }
}

/// sums[r][width] = kHalves halves, from `first` on, of kTiles times 16 rows of w, whose tiles follow rows[tile], times
/// kRows rows of packed x.
template <BlockFormat kFormat, int kRows, int kTiles, int kHalves>
[[gnu::noinline]] void multiply_codes(const LinearInput<bfloat16>& p, const std::byte* const* rows, int first,
                                      std::int64_t ahead, float* sums, std::int64_t width) {
  using Of = BlockCodes<kFormat>;
  constexpr int kParts = kTiles * kHalves;
  constexpr std::int64_t kTileBytes = block_tile_bytes(kFormat);
  __m256 totals[kRows][kParts];
  for (auto& row : totals)
    for (auto& total : row) total = _mm256_setzero_ps();
  const auto* x = static_cast<const float*>(p.packed);
  const std::int64_t row_step = code_words(p.K), end = p.K / kBlockTerms * kTileBytes;
  for (std::int64_t offset = 0; offset < end; offset += kTileBytes) {
    Of parts[kParts];
    __m256 chains[kRows][kParts];
    for (int i = 0; i < kParts; ++i) {
      parts[i] = {rows[i / kHalves] + offset, first + i % kHalves};
      if (parts[i].half == 0) ask_for<kFormat>(parts[i].tile + ahead);
      for (int r = 0; r < kRows; ++r) chains[r][i] = _mm256_broadcast_ss(x + r * row_step);
    }
    ++x;
#pragma GCC unroll 8
    for (int run = 0; run < Of::kRuns; ++run, x += Of::kPlaces) {
      __m256i codes[kParts];
      for (int i = 0; i < kParts; ++i) codes[i] = parts[i].run(run);
      Of::for_places([&]<int kPlace>() __attribute__((always_inline)) {
        for (int i = 0; i < kParts; ++i) {
          const __m256 weights = Of::template floats<kPlace>(codes[i]);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r)
            chains[r][i] = _mm256_fmadd_ps(weights, _mm256_broadcast_ss(x + r * row_step + kPlace), chains[r][i]);
        }
      });
    }
    for (int i = 0; i < kParts; ++i)
      for (int r = 0; r < kRows; ++r) totals[r][i] = _mm256_fmadd_ps(chains[r][i], parts[i].scales(), totals[r][i]);
  }
  for (int r = 0; r < kRows; ++r)
    for (int i = 0; i < kParts; ++i)
      _mm256_storeu_ps(sums + r * width + i / kHalves * kBlockTileRows + (first + i % kHalves) * kCodeLanes,
                       Of::rows_in_lanes(totals[r][i]));
}

/// chains[r] += a term of 16 rows of w times that of kRows rows of x, which lie side by side.
template <int kRows>
[[gnu::always_inline]] inline void add_term(const float* x, __m256 low, __m256 high,
                                            __m256 (&chains)[kRows][kCodeHalves]) {
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    const __m256 each = _mm256_broadcast_ss(x + r);
    chains[r][0] = _mm256_fmadd_ps(low, each, chains[r][0]);
    chains[r][1] = _mm256_fmadd_ps(high, each, chains[r][1]);
  }
}

/// sums[r][width], 16 of a row, = or += `count` blocks, whose tiles follow each other, times kRows rows of packed x,
/// which lie side by side, `step` of them. codes[count][32][16] are those of the blocks as floats: the first rows of x
/// write them, which costs them no time, since ports that multiply are busy and others are not.
template <BlockFormat kFormat, int kRows, bool kFirst>
[[gnu::noinline]] void add_code_blocks(const std::byte* tile, std::int64_t count, float* codes, const float* x,
                                       std::int64_t step, bool goes_on, float* sums, std::int64_t width) {
  using Of = BlockCodes<kFormat>;
  for (; count > 0; --count, tile += block_tile_bytes(kFormat), goes_on = true) {
    __m256 chains[kRows][kCodeHalves];
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
      for (auto& chain : chains[r]) chain = _mm256_broadcast_ss(x + r);
    x += step;
    if constexpr (kFirst) {
#pragma GCC unroll 8
      for (int run = 0; run < Of::kRuns; ++run) {
        const __m256i lanes[] = {Of{tile, 0}.run(run), Of{tile, 1}.run(run)};
        Of::for_places([&]<int kPlace>() __attribute__((always_inline)) {
          const __m256 low = Of::template floats<kPlace>(lanes[0]), high = Of::template floats<kPlace>(lanes[1]);
          _mm256_store_ps(codes, low);
          _mm256_store_ps(codes + kCodeLanes, high);
          add_term<kRows>(x, low, high, chains);
          x += step;
          codes += kBlockTileRows;
        });
      }
    } else {
#pragma GCC unroll 8
      for (int k = 0; k < kBlockTerms; ++k, x += step, codes += kBlockTileRows)
        add_term<kRows>(x, _mm256_load_ps(codes), _mm256_load_ps(codes + kCodeLanes), chains);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r)
      for (int half = 0; half < kCodeHalves; ++half) {
        float* const sum = sums + r * width + half * kCodeLanes;
        const __m256 before = goes_on ? _mm256_loadu_ps(sum) : _mm256_setzero_ps();
        _mm256_storeu_ps(sum, _mm256_fmadd_ps(chains[r][half], Of{tile, half}.scales(), before));
      }
  }
}

/// sums[r][width] = 16 rows of w times rows [m0, m0 + rows) of packed x, which lie side by side in panels: these share
/// the codes of some blocks at a time, which stay in the nearest cache.
template <BlockFormat kFormat>
[[gnu::noinline]] void multiply_panels(const LinearInput<bfloat16>& p, std::int64_t m0, std::int64_t rows,
                                       const std::byte* tiles, std::int64_t ahead, float* sums, std::int64_t width) {
  constexpr std::int64_t kBlocks = 4, kPanel = kPanelRows<bfloat16>, kGroup = 6;
  const std::int64_t blocks = p.K / kBlockTerms, words = code_words(p.K);
  alignas(64) float codes[kBlocks * kBlockTerms * kBlockTileRows];
  for (std::int64_t b = 0; b < blocks; b += kBlocks) {
    const std::int64_t count = smaller(blocks - b, kBlocks);
    const std::byte* const tile = tiles + b * block_tile_bytes(kFormat);
    for (std::int64_t i = 0; i < count; ++i) ask_for<kFormat>(tile + i * block_tile_bytes(kFormat) + ahead);
    for (std::int64_t m = 0; m < rows; m += kPanel) {
      const std::int64_t here = smaller(rows - m, kPanel), step = (here + kCodeLanes - 1) / kCodeLanes * kCodeLanes;
      const float* const x = static_cast<const float*>(p.packed) + (m0 + m) * words + b * kCodeWords * step;
      for (std::int64_t r = 0, taken; r < here; r += taken) {
        const std::int64_t left = here - r, groups = (left + kGroup - 1) / kGroup;
        taken = here == kPanel ? 4 : (left + groups - 1) / groups;  // groups of one size, or nearly
        with_constant<kGroup>(static_cast<int>(taken), [&](auto n) {
          const auto add = m + r == 0 ? add_code_blocks<kFormat, n(), true> : add_code_blocks<kFormat, n(), false>;
          add(tile, count, codes, x + r, step, b > 0, sums + (m + r) * width, width);
        });
      }
    }
  }
  if constexpr (BlockCodes<kFormat>::kBytes)
    for (std::int64_t m = 0; m < rows; ++m)
      for (int half = 0; half < kCodeHalves; ++half) {
        float* const at = sums + m * width + half * kCodeLanes;
        _mm256_storeu_ps(at, BlockCodes<kFormat>::rows_in_lanes(_mm256_loadu_ps(at)));
      }
}
#endif

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
