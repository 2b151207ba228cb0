// Forward products of bfloat16 by tiles, of up to 127 rows of x (wide_tiles.h: of more). 16 rows of w are operand A, 16
// rows of x operand B, so the result is y turned. w is read as the trainer stores it; x is packed as pairs. An output
// depends on its row of w and its row of x alone: the number of rows, the tiling and threads change no bit, because
// terms always come in steps of 32 from the first on.
#pragma once
#include "kernels/cpu/linear_panel.h"
#include "kernels/tiles/tile_block.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// 32-bit words of 16 packed rows of x: [pairs][16 rows].
constexpr std::int64_t packed_group_words(std::int64_t K) { return tile_steps(K) * kTilePairs * kTileRows; }

/// Lays out 16 rows of an operand A, of which `have` exist, tile after tile; what does not exist is zero.
inline OperandRows lay_out(const bfloat16* from, std::int64_t ld, std::int64_t have, std::int64_t K, char* out) {
  constexpr std::int64_t kStep = kTileRows * kTileBytes;
  const std::int64_t whole = K / kTileTerms, steps = tile_steps(K);
  for (int i = 0; i < kTileRows; ++i) {
    char* const row = out + i * kTileBytes;
    const bfloat16* const at = from + (i < have ? i * ld : 0);
    const std::int64_t copied = i < have ? whole : 0;
    for (std::int64_t s = 0; s < copied; ++s) __builtin_memcpy(row + s * kStep, at + s * kTileTerms, kTileBytes);
    for (std::int64_t s = copied; s < steps; ++s) __builtin_memset(row + s * kStep, 0, kTileBytes);
    if (i < have && whole < steps)
      __builtin_memcpy(row + whole * kStep, at + whole * kTileTerms,
                       static_cast<std::size_t>(K - whole * kTileTerms) * sizeof(*at));
  }
  return {out, kTileBytes, kStep};
}

/// Whether rows so far apart may be multiplied where they lie. A multiple of 4 KiB puts them into the same sets of the
/// caches.
constexpr bool lie_well(std::int64_t ld) { return ld * static_cast<std::int64_t>(sizeof(bfloat16)) % 4096 != 0; }

/// `rows` rows of K terms as operand A: where they lie, or laid out.
struct RowsOfA {
  const bfloat16* from;
  std::int64_t ld;
  char* packed;  ///< what lay_out has written, 16 rows after 16 rows
  std::int64_t rows, K;
  bool is_row_major = true;  ///< otherwise it is their columns that lie side by side

  bool in_place() const { return is_row_major && K % kTileTerms == 0 && rows % kTileRows == 0 && lie_well(ld); }
  void lay_out_all() const {
    for (std::int64_t m = 0; m < rows; m += kTileRows)
      lay_out(from + m * ld, ld, rows - m, K, packed + m * tile_steps(K) * kTileBytes);
  }
  /// 16 rows from row m on, a multiple of 16, from a step of terms on.
  OperandRows at(std::int64_t m, std::int64_t step) const {
    constexpr std::int64_t kStep = kTileRows * kTileBytes, kSize = sizeof(bfloat16);
    if (in_place()) return {reinterpret_cast<const char*>(from + m * ld + step * kTileTerms), ld * kSize, kTileBytes};
    return {packed + (m / kTileRows * tile_steps(K) + step) * kStep, kTileBytes, kStep};
  }
};

/// 16 packed columns of B, as linear_pack_bf16 and gemm_pack_bf16 lay them out.
inline OperandPairs packed_columns(const std::uint32_t* packed) { return {packed, kTileRows, kTilePairs * kTileRows}; }

/// kWidth columns with up to kLinearTileM rows from row m on; a row's sums go to store(m, sums).
template <std::int64_t kWidth, class Store>
void tile_rows_by_columns(Tiles& tiles, const LinearInput<bfloat16>& p, std::int64_t m0, const OperandRows* w,
                          const Store& store) {
  using V = ShortVec<float>;
  constexpr std::int64_t kRows = kLinearTileM;
  constexpr int kStrips = static_cast<int>(kWidth) / kTileRows;
  alignas(64) float by_column[kWidth * kRows], sums[V::kLanes * kWidth];
  const std::int64_t rows = smaller(kRows, p.M - m0), groups = (rows + kTileRows - 1) / kTileRows;
  const auto* const x = static_cast<const std::uint32_t*>(p.packed) + m0 / kTileRows * packed_group_words(p.K);
  for (int strip = 0; strip < kStrips; strip += 2)
    for (std::int64_t g = 0; g < groups; g += 2) {
      const auto* const at = x + g * packed_group_words(p.K);
      const OperandPairs columns[2] = {packed_columns(at), packed_columns(at + packed_group_words(p.K))};
      float* const out = by_column + strip * kTileRows * kRows + g * kTileRows;
      with_constant<2>(strip + 1 < kStrips ? 2 : 1, [&](auto a) {
        with_constant<2>(g + 1 < groups ? 2 : 1,
                         [&](auto b) { tile_block<a(), b()>(tiles, w + strip, columns, tile_steps(p.K), out, kRows); });
      });
    }
  for (std::int64_t first = 0; first < rows; first += V::kLanes) {
    turn_sums<V>(by_column, static_cast<int>(kRows), static_cast<int>(first), static_cast<int>(kWidth), kWidth, sums);
    for (int i = 0; i < V::kLanes && first + i < rows; ++i) store(m0 + first + i, sums + i * kWidth);
  }
}

/// Whether rows of w are multiplied where they lie. With more rows of x a strip is read often enough to be laid out.
inline bool reads_in_place(const LinearInput<bfloat16>& p, std::int64_t ldw) {
  return p.K % kTileTerms == 0 && p.M <= kLinearTileM && lie_well(ldw);
}

/// Computes tiles [begin, end) of p. rows_of(strip, i) gives the i-th 16 rows of w of a strip of kWidth columns and how
/// many of them exist; store_of(strip) takes the sums.
template <std::int64_t kWidth, class RowsOf, class StoreOf>
void run_tile_products(const LinearInput<bfloat16>& p, std::int64_t ldw, const LinearTiles& cut, std::int64_t begin,
                       std::int64_t end, const RowsOf& rows_of, const StoreOf& store_of) {
  constexpr int kStrips = static_cast<int>(kWidth) / kTileRows;
  const bool in_place = reads_in_place(p, ldw);
  Tiles tiles;
  OperandRows w[kStrips];
  for (std::int64_t t = begin; t < end; ++t) {
    const std::int64_t strip = cut.strip(t);
    if (t == begin || t % cut.steps == 0)
      for (int i = 0; i < kStrips; ++i) {
        const auto [rows, have] = rows_of(strip, i);
        if (in_place && have >= kTileRows) {
          w[i] = {reinterpret_cast<const char*>(rows), ldw * static_cast<std::int64_t>(sizeof(bfloat16)), kTileBytes};
        } else {
          w[i] = lay_out(rows, ldw, have, p.K,
                         reinterpret_cast<char*>(p.strip_room) + i * tile_steps(p.K) * kTileRows * kTileBytes);
        }
      }
    tile_rows_by_columns<kWidth>(tiles, p, cut.row(t), w, store_of(strip));
  }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
