// The forward product of many rows: both operands packed, sums by register_tile. The same chains as in linear_panel.h,
// so the same bits.
#pragma once
#include "kernels/cpu/linear_panel.h"
#include "kernels/cpu/register_tile.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T>
constexpr bool kHasWide = kHasRegisterTile && std::is_same_v<typename Terms<T>::Word, float>;

#if defined(__AVX512F__)
static_assert(kLinearTileN == kRegisterColumns && kLinearWideRows % (2 * kRegisterRows) == 0);

/// Panels [words][kRegisterRows] of rows [m0, m1) of x, two at a time; absent rows are zero.
template <class T>
void pack_wide_rows(const LinearInput<T>& p, std::int64_t m0, std::int64_t m1, float* panels) {
  using V = typename Terms<T>::V;
  constexpr int kLanes = V::kLanes, kPerWord = Terms<T>::kPerWord;
  static_assert(kLanes == 2 * kRegisterRows);
  const std::int64_t words = words_of<T>(p.K);
  for (std::int64_t m = m0; m < m1; m += kLanes, panels += kLanes * words) {
    const std::int64_t rows = smaller<std::int64_t>(m1 - m, kLanes);
    for (std::int64_t k = 0; k < words; k += kLanes)
      turn_square<T>(p.x + m * p.ldx + k * kPerWord, p.ldx, rows, p.K - k * kPerWord, words - k,
                     [&](int i, V v) __attribute__((always_inline)) {
                       store_rows(v.part[0], panels + (k + i) * kRegisterRows,
                                  panels + (words + k + i) * kRegisterRows);
                     });
  }
}

/// Tiles of rows by strips; a strip is kParts times kLinearTileN columns. A row's sums go to store_of(strip)(m, sums).
template <int kParts, class T, class StoreOf>
  requires(kHasWide<T>)
void run_wide(const LinearInput<T>& p, const LinearWideTile& tile, const StoreOf& store_of) {
  constexpr int kWidth = kParts * kRegisterColumns;
  const std::int64_t m1 = tile.m1, panels = (m1 - tile.m0 + kRegisterRows - 1) / kRegisterRows,
                     words = words_of<T>(p.K);
  if (!tile.is_packed) pack_wide_rows(p, tile.m0, m1, tile.packed_x);
  alignas(64) float sums[kLinearWideRows * kWidth];
  const float* w = tile.packed_w;
  for (std::int64_t strip = tile.strip_begin; strip < tile.strip_end; ++strip) {
    const auto store = store_of(strip);
    for (int part = 0; part < kParts; ++part)
      for (std::int64_t k0 = 0; k0 < words; k0 += kLinearWideWords) {
        const std::int64_t steps = smaller(kLinearWideWords, words - k0);
        const float* const next = w + steps * kRegisterColumns;  // of the weights: each panel asks for its share
        for (std::int64_t i = 0; i < panels; ++i) {
          if (part == kParts - 1 && k0 + steps == words)
            for (std::int64_t m = tile.m0 + i * kRegisterRows; m < smaller(tile.m0 + (i + 1) * kRegisterRows, m1); ++m)
              store.ask_ahead(m);
          register_tile<T, kWidth>(tile.packed_x + (i * words + k0) * kRegisterRows, w, steps, k0 > 0,
                                   next + i * (steps / 4 * 16),
                                   sums + i * kRegisterRows * kWidth + part * kRegisterColumns);
        }
        w = next;
      }
    for (std::int64_t m = tile.m0; m < m1; ++m) store(m, sums + (m - tile.m0) * kWidth);
  }
}
#endif

/// Never called: linear_wide says so.
template <int kParts, class T, class StoreOf>
  requires(!kHasWide<T>)
void run_wide(const LinearInput<T>&, const LinearWideTile&, const StoreOf&) {}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
