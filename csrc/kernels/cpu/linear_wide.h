// The forward product of many rows: both operands packed, sums by register_tile. The same chains as in linear_panel.h, so the same bits.
#pragma once
#include "kernels/cpu/linear_panel.h"
#include "kernels/cpu/register_tile.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T>
constexpr bool kHasWide = kHasRegisterTile && std::is_same_v<typename Terms<T>::Word, float> && Terms<T>::kPerWord == 1;

#if defined(__AVX512F__)
constexpr std::int64_t kWideTerms = 1024;  ///< terms that a panel of x and a strip of w keep in the near caches
static_assert(kLinearTileN == kRegisterColumns && kLinearWideRows % (2 * kRegisterRows) == 0);

/// Panels [K][kRegisterRows] of rows [m0, m1) of x, two at a time; absent rows are zero.
template <class T>
void pack_wide_rows(const LinearInput<T>& p, std::int64_t m0, std::int64_t m1, float* panels) {
  constexpr int kLanes = F32::kLanes;
  static_assert(kLanes == 2 * kRegisterRows);
  for (std::int64_t m = m0; m < m1; m += kLanes, panels += kLanes * p.K) {
    const std::int64_t rows = smaller<std::int64_t>(m1 - m, kLanes);
    for (std::int64_t k = 0; k < p.K; k += kLanes) {
      const int terms = static_cast<int>(smaller<std::int64_t>(p.K - k, kLanes));
      F32::V v[kLanes];
      for (int i = 0; i < kLanes; ++i) v[i] = i < rows ? Terms<T>::words(p.x + (m + i) * p.ldx + k, terms) : F32::zero();
      turn<F32>(v);
      for (int i = 0; i < terms; ++i) store_rows(v[i], panels + (k + i) * kRegisterRows, panels + (p.K + k + i) * kRegisterRows);
    }
  }
}

/// Tiles of rows by strips; a strip is kParts times kLinearTileN columns. A row's sums go to store_of(strip)(m, sums).
template <int kParts, class T, class StoreOf>
  requires(kHasWide<T>)
void run_wide(const LinearInput<T>& p, const LinearWideTile& tile, const StoreOf& store_of) {
  constexpr int kWidth = kParts * kRegisterColumns;
  const std::int64_t m1 = smaller(tile.m0 + kLinearWideRows, p.M), panels = (m1 - tile.m0 + kRegisterRows - 1) / kRegisterRows;
  if (!tile.is_packed) pack_wide_rows(p, tile.m0, m1, tile.packed_x);
  alignas(64) float sums[kLinearWideRows * kWidth];
  const float* w = tile.packed_w;
  for (std::int64_t strip = tile.strip_begin; strip < tile.strip_end; ++strip) {
    for (int part = 0; part < kParts; ++part)
      for (std::int64_t k0 = 0; k0 < p.K; k0 += kWideTerms) {
        const std::int64_t terms = smaller(kWideTerms, p.K - k0);
        const float* const next = w + terms * kRegisterColumns;  // of the weights: each panel asks for its share
        for (std::int64_t i = 0; i < panels; ++i)
          register_tile<kWidth>(tile.packed_x + (i * p.K + k0) * kRegisterRows, w, terms, k0 > 0, next + i * (terms / 4 * 16),
                                sums + i * kRegisterRows * kWidth + part * kRegisterColumns);
        w = next;
      }
    const auto store = store_of(strip);
    for (std::int64_t m = tile.m0; m < m1; ++m) store(m, sums + (m - tile.m0) * kWidth);
  }
}
#endif

/// Never called: linear_wide_from says so.
template <int kParts, class T, class StoreOf>
  requires(!kHasWide<T>)
void run_wide(const LinearInput<T>&, const LinearWideTile&, const StoreOf&) {}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
