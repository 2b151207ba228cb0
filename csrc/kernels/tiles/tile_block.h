// Sums of up to two by two tiles: what every product by tiles is made of, and how its operands lie in memory.
#pragma once
#include "kernels/cpu/terms.h"
#if defined(NRL_HARDWARE_TILES)
#include "kernels/tiles/amx_tiles.h"
#else
#include "kernels/tiles/software_tiles.h"
#endif

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(NRL_HARDWARE_TILES)
using Tiles = AmxTiles;
#else
using Tiles = SoftwareTiles;
#endif
static_assert(Tiles::kOrder == SumOrder::tiles);

/// 16 rows of operand A: the tile of step s lies at rows + s * step, its rows `stride` apart; both in bytes.
struct OperandRows {
  const char* rows;
  std::int64_t stride, step;
};

/// 16 columns of operand B, in pairs of terms: that of step s lies at pairs + s * step, its rows of pairs `stride`
/// apart; both in words.
struct OperandPairs {
  const std::uint32_t* pairs;
  std::int64_t stride, step;
};

/// sums[16 * kA][stride] = kA times 16 rows of A with kB times 16 columns of B; kAdd: added to what is there. Tiles 0
/// to 3 hold sums, 4 and 5 A, 6 and 7 B.
template <int kA, int kB, bool kAdd = false>
[[gnu::always_inline]] inline void tile_block(Tiles& tiles, const OperandRows* a, const OperandPairs* b,
                                              std::int64_t steps, float* sums, std::int64_t stride) {
  static_assert(kA <= 2 && kB <= 2);
  constexpr std::int64_t kWord = sizeof(std::uint32_t);
  const std::int64_t bytes = stride * kWord;
  float* const below = sums + kTileRows * stride;
  if constexpr (kAdd) {
    tiles.template load<0>(sums, bytes);
    if constexpr (kB > 1) tiles.template load<1>(sums + kTileRows, bytes);
    if constexpr (kA > 1) tiles.template load<2>(below, bytes);
    if constexpr (kA > 1 && kB > 1) tiles.template load<3>(below + kTileRows, bytes);
  } else {
    tiles.template zero<0>();
    if constexpr (kB > 1) tiles.template zero<1>();
    if constexpr (kA > 1) tiles.template zero<2>();
    if constexpr (kA > 1 && kB > 1) tiles.template zero<3>();
  }
  for (std::int64_t s = 0; s < steps; ++s) {
    tiles.template load<4>(a[0].rows + s * a[0].step, a[0].stride);
    tiles.template load<6>(b[0].pairs + s * b[0].step, b[0].stride * kWord);
    tiles.template multiply<0, 4, 6>();
    if constexpr (kB > 1) {
      tiles.template load<7>(b[1].pairs + s * b[1].step, b[1].stride * kWord);
      tiles.template multiply<1, 4, 7>();
    }
    if constexpr (kA > 1) {
      tiles.template load<5>(a[1].rows + s * a[1].step, a[1].stride);
      tiles.template multiply<2, 5, 6>();
    }
    if constexpr (kA > 1 && kB > 1) tiles.template multiply<3, 5, 7>();
  }
  tiles.template store<0>(sums, bytes);
  if constexpr (kB > 1) tiles.template store<1>(sums + kTileRows, bytes);
  if constexpr (kA > 1) tiles.template store<2>(below, bytes);
  if constexpr (kA > 1 && kB > 1) tiles.template store<3>(below + kTileRows, bytes);
}

/// The whole product sums[rows][columns] = or += A · B, in tiles of 16 by 16: what lies in the last tiles behind
/// `rows` and `columns` is overwritten. `a` and `b` are the first 16 rows and columns; the following ones lie a_next
/// bytes and b_next words after them.
template <bool kAdd>
inline void tile_product(Tiles& tiles, OperandRows a, std::int64_t a_next, std::int64_t rows, const OperandPairs& b,
                         std::int64_t b_next, std::int64_t columns, std::int64_t steps, float* sums,
                         std::int64_t stride) {
  for (std::int64_t r = 0; r < rows; r += 2 * kTileRows, a.rows += 2 * a_next)
    for (std::int64_t c = 0; c < columns; c += 2 * kTileRows) {
      const OperandRows lines[2] = {a, {a.rows + a_next, a.stride, a.step}};
      const std::uint32_t* const pairs = b.pairs + c / kTileRows * b_next;
      const OperandPairs across[2] = {{pairs, b.stride, b.step}, {pairs + b_next, b.stride, b.step}};
      with_constant<2>(r + kTileRows < rows ? 2 : 1, [&](auto tall) {
        with_constant<2>(c + kTileRows < columns ? 2 : 1, [&](auto wide) {
          tile_block<tall(), wide(), kAdd>(tiles, lines, across, steps, sums + r * stride + c, stride);
        });
      });
    }
}

/// put(j, word j of each of 16 rows), for 16 words: a square of words, turned. Rows are those at[i].
template <class Put>
[[gnu::always_inline]] inline void turn_words(const float* const (&at)[kTileRows], const Put& put) {
#if defined(__AVX512F__)
  for (int q = 0; q < kTilePairs; q += Turned<float>::kTerms) {
    const Turned<float> turned(at, q);
    for (int u = 0; u < Turned<float>::kTerms; ++u) store(reinterpret_cast<float*>(put(q + u)), turned.column[u]);
  }
#else
  for (int j = 0; j < kTilePairs; ++j)
    for (int i = 0; i < kTileRows; ++i) __builtin_memcpy(put(j) + i, at[i] + j, sizeof(float));
#endif
}

/// out[j][i] = square[i][j].
inline void turn_words(const std::uint32_t (&square)[kTileRows][kTilePairs], std::uint32_t* out) {
  const float* at[kTileRows];
  for (int i = 0; i < kTileRows; ++i) at[i] = reinterpret_cast<const float*>(square[i]);
  turn_words(at, [&](int j) __attribute__((always_inline)) { return out + j * kTileRows; });
}

/// to[i] = first[i] below second[i], n pairs; an absent row (nullptr) is zeros.
inline void join_pairs(const bfloat16* first, const bfloat16* second, std::int64_t n, std::uint32_t* to) {
  if (first != nullptr && second != nullptr) {
    for (std::int64_t i = 0; i < n; ++i) to[i] = first[i].bits | static_cast<std::uint32_t>(second[i].bits) << 16;
  } else if (first != nullptr) {
    for (std::int64_t i = 0; i < n; ++i) to[i] = first[i].bits;
  } else {
    fill(to, n, std::uint32_t{0});
  }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
