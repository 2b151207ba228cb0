// The forward products of bfloat16 where tiles form the sums (tile_products.h).
#include "kernels/cpu/linear_store.h"
#include "kernels/tiles/tile_products.h"
#include "kernels/tiles/wide_tiles.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

struct RowsOfW {
  const bfloat16* rows;
  std::int64_t have;
};

template <class O>
void linear_forward(const LinearForwardArgs<bfloat16, O>& p, std::int64_t tile_begin, std::int64_t tile_end) {
  run_tile_products<kLinearTileN>(
      p.input, p.ldw, LinearTiles(p.input.M, p.N, p.input.K), tile_begin, tile_end,
      [&](std::int64_t strip, int i) {
        const std::int64_t n = strip * kLinearTileN + i * kTileRows;
        const std::int64_t row = smaller(n, p.N - 1) - p.first_strip * kLinearTileN;
        return RowsOfW{p.w + row * p.ldw, larger<std::int64_t>(0, p.N - n)};
      },
      [&](std::int64_t strip) { return store_strip(p, strip); });
}

template <class O>
void linear_forward_wide(const LinearForwardArgs<bfloat16, O>& p, const LinearWideTile& tile) {
  run_wide_tiles(p.input, tile, [&](std::int64_t strip) { return store_strip<kTileWideColumns>(p, strip); });
}

/// Packs 16 rows of x, or of w, of which `have` exist.
void pack_group(const bfloat16* x, std::int64_t ldx, std::int64_t have, std::int64_t K, std::uint32_t* out) {
  alignas(64) std::uint32_t square[kTileRows][kTilePairs];
  const float* at[kTileRows];
  for (std::int64_t s = 0; s < tile_steps(K); ++s, out += kTilePairs * kTileRows) {
    const std::int64_t terms = smaller(kTileTerms, K - s * kTileTerms);
    for (int i = 0; i < kTileRows; ++i) {
      if (i < have && terms == kTileTerms) {
        at[i] = reinterpret_cast<const float*>(x + i * ldx + s * kTileTerms);
        continue;
      }
      const std::int64_t present = i < have ? terms : 0;
      __builtin_memset(square[i], 0, kTileBytes);
      __builtin_memcpy(square[i], x + (present > 0 ? i * ldx + s * kTileTerms : 0),
                       static_cast<std::size_t>(present) * sizeof(*x));
      at[i] = reinterpret_cast<const float*>(square[i]);
    }
    turn_words(at, [&](int j) __attribute__((always_inline)) { return out + j * kTileRows; });
  }
}

}  // namespace

LinearWide linear_wide_bf16(std::int64_t K) {
  const std::int64_t rows = kTileWideTerms / larger<std::int64_t>(K, 1) / (2 * kTileRows) * (2 * kTileRows);
  return {K <= kTileWideLongRow ? kTileWideRows : kTileWideRowsOfLong, tile_steps(K) * kTilePairs,
          clamped(rows, 2 * kTileRows, kTileWideChunk), kTileWideColumns};
}
void linear_pack_weights_bf16(const bfloat16* w, std::int64_t ldw, std::int64_t rows, std::int64_t K, float* out) {
  auto* to = reinterpret_cast<std::uint32_t*>(out);
  for (std::int64_t n = 0; n < kLinearTileN; n += kTileRows, to += packed_group_words(K))
    pack_group(w + (n < rows ? n * ldw : 0), ldw, rows - n, K, to);
}

std::int64_t linear_strip_floats_bf16(std::int64_t, std::int64_t K, std::int64_t tile_n) {
  return tile_n * tile_steps(K) * kTilePairs;
}

void linear_pack_bf16(const LinearInput<bfloat16>& p, std::int64_t begin, std::int64_t end) {
  const std::int64_t last = smaller(end * kLinearTileM, p.M);
  for (std::int64_t m = begin * kLinearTileM; m < last; m += kTileRows)
    pack_group(p.x + m * p.ldx, p.ldx, last - m, p.K,
               static_cast<std::uint32_t*>(p.packed) + m / kTileRows * packed_group_words(p.K));
}

void linear_forward_bf16(const LinearForwardArgs<bfloat16, bfloat16>& p, std::int64_t b, std::int64_t e, bool) {
  linear_forward(p, b, e);
}
void linear_forward_bf16_f32(const LinearForwardArgs<bfloat16, float>& p, std::int64_t b, std::int64_t e, bool) {
  linear_forward(p, b, e);
}

void linear_forward_wide_bf16(const LinearForwardArgs<bfloat16, bfloat16>& p, const LinearWideTile& tile) {
  linear_forward_wide(p, tile);
}
void linear_forward_wide_bf16_f32(const LinearForwardArgs<bfloat16, float>& p, const LinearWideTile& tile) {
  linear_forward_wide(p, tile);
}
void linear_swiglu_wide_bf16(const LinearSwigluArgs<bfloat16>& p, const LinearWideTile& tile) {
  run_wide_tiles(p.input, tile, [&](std::int64_t strip) { return store_strip(p, strip); });
}

void linear_swiglu_bf16(const LinearSwigluArgs<bfloat16>& p, std::int64_t tile_begin, std::int64_t tile_end, bool) {
  constexpr int kGates = kHalf / kTileRows;  // times 16 rows
  run_tile_products<kSwigluTileN>(
      p.input, p.ldw, LinearTiles(p.input.M, 2 * p.I, p.input.K, kSwigluTileN), tile_begin, tile_end,
      [&](std::int64_t strip, int i) {
        const std::int64_t n = strip * kHalf + i % kGates * kTileRows,
                           row = smaller(n, p.I - 1) - p.first_strip * kHalf;
        return RowsOfW{(i < kGates ? p.w : p.up) + row * p.ldw, larger<std::int64_t>(0, p.I - n)};
      },
      [&](std::int64_t strip) { return store_strip(p, strip); });
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
