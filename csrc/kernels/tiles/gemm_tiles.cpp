// The backward products of bfloat16 by tiles: rows of a are operand A, columns of b operand B, both packed tile after
// tile.
#include "kernels/cpu/gemm_store.h"
#include "kernels/gemm.h"
#include "kernels/tiles/tile_products.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kBlockRows = 2 * kTileRows;  // two by two tiles of sums
static_assert(kGemmPackTerms == kTileTerms && kGemmTerms % kTileTerms == 0);
static_assert(kGemmTileM % kBlockRows == 0 && kGemmTileN % kBlockRows == 0);

std::int64_t terms_of_block(std::int64_t K, std::int64_t k0) { return smaller(kGemmTerms, K - k0); }

/// out[16] = pairs of the first n elements of two rows; absent rows and elements are zero.
void interleave(const bfloat16* first, std::int64_t ld, std::int64_t rows, int n, std::uint32_t* out) {
#if defined(NRL_HARDWARE_TILES)
  if (rows > 0 && n > 0)
    return store(reinterpret_cast<float*>(out), Terms<bfloat16>::across(first, ld, rows > 1 ? 2 : 1, n));
#endif
  for (int j = 0; j < kTilePairs; ++j) {
    const std::uint32_t low = rows > 0 && j < n ? first[j].bits : 0, high = rows > 1 && j < n ? first[ld + j].bits : 0;
    out[j] = low | high << 16;
  }
}

/// One step of terms of b, `have` of which exist, for all columns.
void pack_b(const GemmInput<bfloat16>& p, std::int64_t k0, std::int64_t step) {
  const std::int64_t terms = terms_of_block(p.K, k0), have = smaller(kTileTerms, terms - step * kTileTerms);
  const bfloat16* const b = p.b + (k0 + step * kTileTerms) * p.ldb;
  for (std::int64_t n = 0; n < p.N; n += kTileRows) {
    auto* const out = static_cast<std::uint32_t*>(p.packed_b) + n / kTileRows * packed_group_words(terms) +
                      step * kTilePairs * kTileRows;
    const int columns = static_cast<int>(smaller<std::int64_t>(kTileRows, p.N - n));
    for (int pair = 0; pair < kTilePairs; ++pair)
      interleave(b + (pair * 2 < have ? pair * 2 * p.ldb : 0) + n, p.ldb, have - pair * 2, columns,
                 out + pair * kTileRows);
  }
}

/// out[16][pairs]: one step of 16 columns of the transposed operand, which lie side by side in memory.
void turn_step(const bfloat16* a, std::int64_t ld, std::int64_t terms, int columns, std::uint32_t* out) {
  alignas(64) std::uint32_t square[kTilePairs][kTileRows];
  for (int pair = 0; pair < kTilePairs; ++pair)
    interleave(a + (pair * 2 < terms ? pair * 2 * ld : 0), ld, terms - pair * 2, columns, square[pair]);
  turn_words(square, out);
}

/// Rows [m0, m1) of a block of a: 16 rows after 16 rows, in each step after step.
void pack_a(const GemmInput<bfloat16>& p, std::int64_t k0, std::int64_t m0, std::int64_t m1, std::uint32_t* out) {
  const std::int64_t terms = terms_of_block(p.K, k0);
  const bfloat16* const a = p.a + k0 * p.col_stride_a;
  for (std::int64_t m = m0; m < m1; m += kTileRows, out += packed_group_words(terms)) {
    if (p.col_stride_a == 1) {
      lay_out(a + m * p.row_stride_a, p.row_stride_a, m1 - m, terms, reinterpret_cast<char*>(out));
      continue;
    }
    const int rows = static_cast<int>(smaller<std::int64_t>(kTileRows, m1 - m));
    for (std::int64_t s = 0; s < tile_steps(terms); ++s)
      turn_step(a + m + s * kTileTerms * p.col_stride_a, p.col_stride_a, terms - s * kTileTerms, rows,
                out + s * kTilePairs * kTileRows);
  }
}

template <class O>
void gemm(const GemmArgs<bfloat16, O>& args, const GemmTile& tile) {
  const GemmInput<bfloat16>& p = args.input;
  const std::int64_t terms = terms_of_block(p.K, tile.k0), group = packed_group_words(terms),
                     m1 = smaller(tile.m0 + kGemmTileM, p.M);
  auto* const rows = static_cast<std::uint32_t*>(tile.packed_a);
  if (!tile.is_packed) pack_a(p, tile.k0, tile.m0, m1, rows);
  Tiles tiles;
  for (std::int64_t n = tile.n0; n < tile.n1; n += kBlockRows)
    for (std::int64_t m = tile.m0; m < m1; m += kBlockRows) {
      const auto* const b = static_cast<const std::uint32_t*>(p.packed_b) + n / kTileRows * group;
      OperandRows a[2];
      for (int i = 0; i < 2; ++i)
        a[i] = {reinterpret_cast<const char*>(rows + ((m - tile.m0) / kTileRows + i) * group), kTileBytes,
                kTileRows * kTileBytes};
      const OperandPairs columns[2] = {packed_columns(b), packed_columns(b + group)};
      alignas(64) float sums[kBlockRows * kBlockRows];
      with_constant<2>(m + kTileRows < m1 ? 2 : 1, [&](auto tall) {
        with_constant<2>(n + kTileRows < tile.n1 ? 2 : 1, [&](auto wide) {
          tile_block<tall(), wide()>(tiles, a, columns, tile_steps(terms), sums, kBlockRows);
        });
      });
      const BlockSums<bfloat16, O> to{
          args.c + m * args.ldc + n, args.ldc,       args.sums ? args.sums + m * p.N + n : nullptr, p.N, tile.k0 == 0,
          tile.k0 + terms == p.K,    args.accumulate};
      const int width = static_cast<int>(smaller<std::int64_t>(kBlockRows, tile.n1 - n));
      for (int i = 0; i < kBlockRows && m + i < m1; ++i) {
        if (width == kBlockRows) {
          to.store(i, sums + i * kBlockRows, kBlockRows);  // a known length: whole vectors
        } else {
          to.store(i, sums + i * kBlockRows, width);
        }
      }
    }
}

}  // namespace

void gemm_pack_bf16(const GemmInput<bfloat16>& p, std::int64_t k0, std::int64_t begin, std::int64_t end) {
  for (std::int64_t step = begin; step < end; ++step) pack_b(p, k0, step);
}
void gemm_bf16(const GemmArgs<bfloat16, bfloat16>& p, const GemmTile& tile) { gemm(p, tile); }
void gemm_bf16_f32(const GemmArgs<bfloat16, float>& p, const GemmTile& tile) { gemm(p, tile); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
