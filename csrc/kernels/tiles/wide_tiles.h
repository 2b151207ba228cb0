// The forward product of many rows by tiles: rows of x are operand A, rows of w, packed as pairs once for all rows of
// x, are operand B. A product of two terms does not ask which of them came from x, so the bits are those of
// tile_products.h. But here the result need not be turned, and w is laid out once instead of once for each block of
// rows.
#pragma once
#include "kernels/tiles/tile_products.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kWideGroups = static_cast<int>(kTileWideColumns) / kTileRows;
static_assert(kWideGroups % 2 == 0 && kTileWideColumns == kSwigluTileN);

/// Tiles of rows by strips of kTileWideColumns columns; a row's sums go to store_of(strip)(m, sums).
template <class StoreOf>
void run_wide_tiles(const LinearInput<bfloat16>& p, const LinearWideTile& tile, const StoreOf& store_of) {
  const std::int64_t rows = tile.m1 - tile.m0, steps = tile_steps(p.K), group = packed_group_words(p.K);
  const RowsOfA a{p.x + tile.m0 * p.ldx, p.ldx, reinterpret_cast<char*>(tile.packed_x), rows, p.K};
  if (!tile.is_packed && !a.in_place()) a.lay_out_all();
  alignas(64) float sums[2 * kTileRows * kTileWideColumns];
  const auto* w = reinterpret_cast<const std::uint32_t*>(tile.packed_w);
  Tiles tiles;
  for (std::int64_t strip = tile.strip_begin; strip < tile.strip_end; ++strip, w += kWideGroups * group) {
    const auto store = store_of(strip);
    for (std::int64_t m = 0; m < rows; m += 2 * kTileRows) {
      const OperandRows lines[2] = {a.at(m, 0), a.at(m + kTileRows < rows ? m + kTileRows : m, 0)};
      with_constant<2>(m + kTileRows < rows ? 2 : 1, [&](auto tall) {
        for (int g = 0; g < kWideGroups; g += 2) {
          const OperandPairs columns[2] = {packed_columns(w + g * group), packed_columns(w + (g + 1) * group)};
          tile_block<tall(), 2>(tiles, lines, columns, steps, sums + g * kTileRows, kTileWideColumns);
        }
      });
      for (std::int64_t i = 0; i < 2 * kTileRows && m + i < rows; ++i)
        store(tile.m0 + m + i, sums + i * kTileWideColumns);
    }
  }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
