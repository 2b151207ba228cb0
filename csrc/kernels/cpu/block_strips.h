// How products that read weights in blocks are cut: strips of 48 rows of w, which are three rows of tiles.
#pragma once
#include "kernels/cpu/linear_store.h"
#include "kernels/weight_blocks.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// A strip of w, of which `have` rows exist.
struct BlockStrip {
  const std::byte* tiles;
  std::int64_t have;
  std::int64_t ahead;  ///< bytes from a tile to one that is asked for: that of the strip that is read next, or itself
  /// Rows [16 i, 16 i + 16); of rows that do not exist others.
  const std::byte* rows(std::int64_t i, std::int64_t row_bytes) const {
    return tiles + smaller(i, (have - 1) / kBlockTileRows) * kBlockTileRows * row_bytes;
  }
};

/// run(input, format, tiles, begin, end, strip_of, store_of) computes tiles [begin, end): strip_of(tile, i) gives their
/// rows of w, store_of(tile) takes the sums.
template <class O, class Run>
void forward_blocks(const LinearForwardArgs<bfloat16, O>& p, const WeightBlocks& w, std::int64_t begin,
                    std::int64_t end, bool more, const Run& run) {
  const std::int64_t row_bytes = block_row_bytes(w.format, p.input.K);
  const LinearTiles tiles = tiles_of(p);
  run(
      p.input, w.format, tiles, begin, end,
      [&](std::int64_t t, int) {
        const std::int64_t n = tiles.strip(t) * kLinearTileN;
        return BlockStrip{w.at + n * row_bytes, smaller(kLinearTileN, p.N - n),
                          more || t + 1 < end ? kLinearTileN * row_bytes : 0};
      },
      [&](std::int64_t t) { return store_strip(p, tiles.strip(t)); });
}

/// The same with two strips for each tile: gates and their ups, each whole rows of tiles.
template <class Run>
void swiglu_blocks(const LinearSwigluArgs<bfloat16>& p, const WeightBlocks& w, std::int64_t begin, std::int64_t end,
                   bool more, const Run& run) {
  static_assert(kHalf == kLinearTileN && kHalf % kBlockTileRows == 0);
  const std::int64_t row_bytes = block_row_bytes(w.format, p.input.K);
  const LinearTiles tiles = tiles_of(p);
  run(
      p.input, w.format, tiles, begin, end,
      [&](std::int64_t t, int i) {
        const std::int64_t n = tiles.strip(t) * kHalf;
        return BlockStrip{w.at + (i * p.I + n) * row_bytes, smaller<std::int64_t>(kHalf, p.I - n),
                          more || t + 1 < end ? kHalf * row_bytes : 0};
      },
      [&](std::int64_t t) { return store_strip(p, tiles.strip(t)); });
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
