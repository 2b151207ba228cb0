// The backward products of bfloat16 by tiles: rows of a are operand A, columns of b operand B, both packed tile after
// tile.
#include "kernels/cpu/gemm_store.h"
#include "kernels/gemm.h"
#include "kernels/tiles/tile_products.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kBlockRows = 2 * kTileRows;  // two by two tiles of sums
static_assert(kGemmPackTerms == kTileTerms && kGemmTerms % kTileTerms == 0);
static_assert(kTileGemmRows % kBlockRows == 0 && kGemmTileN % kBlockRows == 0);

std::int64_t terms_of_block(std::int64_t K, std::int64_t k0) { return smaller(kGemmTerms, K - k0); }

/// out[16] = pairs of the first n elements of two rows; absent rows and elements are zero.
[[gnu::always_inline]] inline void interleave(const bfloat16* first, std::int64_t ld, std::int64_t rows, int n,
                                              std::uint32_t* out) {
#if defined(__AVX512BW__)
  if (rows > 0 && n > 0) {
    const auto mask = static_cast<__mmask16>(first_lanes(n));
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, first));
    const __m512i high =
        rows > 1 ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, first + ld)) : _mm512_setzero_si512();
    return _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
#endif
  for (int j = 0; j < kTilePairs; ++j) {
    const std::uint32_t low = rows > 0 && j < n ? first[j].bits : 0, high = rows > 1 && j < n ? first[ld + j].bits : 0;
    out[j] = low | high << 16;
  }
}

/// One step of terms of b, for all columns.
void pack_b(const GemmInput<bfloat16>& p, std::int64_t k0, std::int64_t step) {
  const std::int64_t terms = terms_of_block(p.K, k0), have = smaller(kTileTerms, terms - step * kTileTerms),
                     group = packed_group_words(terms);
  const bfloat16* const b = p.b + (k0 + step * kTileTerms - p.first_term) * p.ldb;
  auto* out = static_cast<std::uint32_t*>(p.packed_b) + step * kTilePairs * kTileRows;
  for (std::int64_t n = 0; n < p.N; n += kTileRows, out += group) {
    const int columns = static_cast<int>(smaller<std::int64_t>(kTileRows, p.N - n));
    for (int pair = 0; pair < kTilePairs; ++pair) {
      const bfloat16* const first = b + (pair * 2 < have ? pair * 2 * p.ldb : 0) + n;
      if (have == kTileTerms && columns == kTileRows) {
        interleave(first, p.ldb, 2, kTileRows, out + pair * kTileRows);  // known lengths: whole vectors
      } else {
        interleave(first, p.ldb, have - pair * 2, columns, out + pair * kTileRows);
      }
    }
  }
}

/// out[16][pairs]: one step of up to 16 columns of the transposed operand, which lie side by side in memory.
void turn_step(const bfloat16* a, std::int64_t ld, std::int64_t terms, int columns, std::uint32_t* out) {
  alignas(64) std::uint32_t square[kTilePairs][kTileRows];
  for (int pair = 0; pair < kTilePairs; ++pair)
    interleave(a + (pair * 2 < terms ? pair * 2 * ld : 0), ld, terms - pair * 2, columns, square[pair]);
  turn_words(square, out);
}

/// The same for 32 columns and all 32 terms: out and the 16 rows behind it, `group` words after it. Rows of two terms
/// are joined four columns at a time, as the processor does within a quarter of a register: first columns 0 to 3, 8 to
/// 11, ..., then the others.
void turn_wide_step(const bfloat16* a, std::int64_t ld, std::uint32_t* out, std::int64_t group) {
#if defined(__AVX512BW__)
  alignas(64) float square[2][kTilePairs][kTileRows];
  for (int pair = 0; pair < kTilePairs; ++pair) {
    const __m512i first = _mm512_loadu_si512(a + 2 * pair * ld), second = _mm512_loadu_si512(a + (2 * pair + 1) * ld);
    _mm512_store_si512(square[0][pair], _mm512_unpacklo_epi16(first, second));
    _mm512_store_si512(square[1][pair], _mm512_unpackhi_epi16(first, second));
  }
  for (int half = 0; half < 2; ++half) {
    const float* at[kTileRows];
    for (int pair = 0; pair < kTilePairs; ++pair) at[pair] = square[half][pair];
    turn_words(at, [&](int j) __attribute__((always_inline)) {
      const int column = j / 4 * 8 + half * 4 + j % 4;
      return out + column / kTileRows * group + column % kTileRows * kTilePairs;
    });
  }
#else
  turn_step(a, ld, kTileTerms, kTileRows, out);
  turn_step(a + kTileRows, ld, kTileTerms, kTileRows, out + group);
#endif
}

/// The rows of a transposed operand, whose columns lie side by side: 16 rows after 16 rows, in each step after step.
void turn_rows(const RowsOfA& a, std::int64_t col_stride) {
  const std::int64_t group = packed_group_words(a.K);
  auto* out = reinterpret_cast<std::uint32_t*>(a.packed);
  for (std::int64_t m = 0, groups; m < a.rows; m += groups * kTileRows, out += groups * group) {
    groups = a.rows - m >= 2 * kTileRows ? 2 : 1;
    for (std::int64_t s = 0; s < tile_steps(a.K); ++s) {
      const std::int64_t have = smaller(kTileTerms, a.K - s * kTileTerms);
      const bfloat16* const at = a.from + m + s * kTileTerms * col_stride;
      std::uint32_t* const to = out + s * kTilePairs * kTileRows;
      if (groups == 2 && have == kTileTerms) {
        turn_wide_step(at, col_stride, to, group);
      } else {
        for (std::int64_t g = 0; g < groups; ++g)
          turn_step(at + g * kTileRows, col_stride, have,
                    static_cast<int>(smaller<std::int64_t>(kTileRows, a.rows - m - g * kTileRows)), to + g * group);
      }
    }
  }
}

/// The sums of some rows with up to 32 columns: those of the blocks of terms so far, and where they go.
template <class O>
struct SumsOfColumns {
  static constexpr bool kDirect = BlockSums<bfloat16, O>::kDirect;
  const GemmArgs<bfloat16, O>& args;
  std::int64_t m0, rows, n;
  int columns;
  bool first, last;
  bool continues() const { return !first || (kDirect && args.accumulate); }
  float* before(std::int64_t i) const {
    if constexpr (kDirect) return args.c + (m0 + i) * args.ldc + n;
    return args.sums + (m0 + i) * args.input.N + n;
  }
  void load(float* room) const {
    for (std::int64_t i = 0; i < rows; ++i) copy(before(i), columns, room + i * kBlockRows);
  }
  /// The room holds the sums of all blocks so far, so that nothing before them is added once more.
  void store(const float* room) const {
    const BlockSums<bfloat16, O> to{args.c + m0 * args.ldc + n,
                                    args.ldc,
                                    args.sums ? args.sums + m0 * args.input.N + n : nullptr,
                                    args.input.N,
                                    /*first=*/true,
                                    last,
                                    !kDirect && args.accumulate};
    for (std::int64_t i = 0; i < rows; ++i) to.store(static_cast<int>(i), room + i * kBlockRows, columns);
  }
};

template <class O>
void gemm(const GemmArgs<bfloat16, O>& args, const GemmTile& tile) {
  const GemmInput<bfloat16>& p = args.input;
  const std::int64_t terms = terms_of_block(p.K, tile.k0), group = packed_group_words(terms), steps = tile_steps(terms),
                     rows = tile.m1 - tile.m0;
  const bool is_row_major = p.col_stride_a == 1;
  const RowsOfA lines{p.a + tile.m0 * p.row_stride_a + tile.k0 * p.col_stride_a,
                      p.row_stride_a,
                      static_cast<char*>(tile.packed_a),
                      rows,
                      terms,
                      is_row_major};
  if (!tile.is_packed && !lines.in_place()) {
    if (is_row_major) {
      lines.lay_out_all();
    } else {
      turn_rows(lines, p.col_stride_a);
    }
  }
  alignas(64) float room[kTileGemmRows * kBlockRows];
  Tiles tiles;
  for (std::int64_t n = tile.n0; n < tile.n1; n += kBlockRows) {
    const SumsOfColumns<O> to{args,
                              tile.m0,
                              rows,
                              n,
                              static_cast<int>(smaller<std::int64_t>(kBlockRows, tile.n1 - n)),
                              tile.k0 == 0,
                              tile.k0 + terms == p.K};
    const bool whole = to.kDirect && rows % kTileRows == 0 && to.columns % kTileRows == 0;
    float* const sums = whole ? to.before(0) : room;
    const std::int64_t stride = whole ? args.ldc : kBlockRows;
    if (!whole && to.continues()) to.load(room);
    const auto* const b = static_cast<const std::uint32_t*>(p.packed_b) + n / kTileRows * group;
    for (std::int64_t s = 0; s < steps; s += kTileGemmSteps) {
      const auto* const at = b + s * kTilePairs * kTileRows;
      const OperandPairs columns[2] = {packed_columns(at), packed_columns(at + group)};
      const std::int64_t some = smaller(kTileGemmSteps, steps - s);
      for (std::int64_t m = 0; m < rows; m += kBlockRows) {
        const OperandRows a[2] = {lines.at(m, s), lines.at(m + kTileRows < rows ? m + kTileRows : m, s)};
        with_constant<2>(m + kTileRows < rows ? 2 : 1, [&](auto tall) {
          with_constant<2>(to.columns > kTileRows ? 2 : 1, [&](auto wide) {
            if (s > 0 || to.continues()) {
              tile_block<tall(), wide(), true>(tiles, a, columns, some, sums + m * stride, stride);
            } else {
              tile_block<tall(), wide()>(tiles, a, columns, some, sums + m * stride, stride);
            }
          });
        });
      }
    }
    if (!whole) to.store(room);
  }
}

}  // namespace

std::int64_t gemm_rows_bf16() { return kTileGemmRows; }

void gemm_pack_bf16(const GemmInput<bfloat16>& p, std::int64_t k0, std::int64_t begin, std::int64_t end) {
  for (std::int64_t step = begin; step < end; ++step) pack_b(p, k0, step);
}
void gemm_bf16(const GemmArgs<bfloat16, bfloat16>& p, const GemmTile& tile) { gemm(p, tile); }
void gemm_bf16_f32(const GemmArgs<bfloat16, float>& p, const GemmTile& tile) { gemm(p, tile); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
