// Sums over a tile in a fixed order: lane l adds elements l, l + kLanes, ..., then the lanes are added in order. The
// order depends on nothing but the position in the row, and each lane loop is one vector operation.
#pragma once
#include "kernels/elementwise_math.h"

namespace nemo_rl::kernels {

constexpr int kLanes = 16;
constexpr int kTile = 256;  ///< tokens a tile: its arrays stay in the first-level cache

NRL_INLINE int padded_to_lanes(std::int64_t n) { return static_cast<int>((n + kLanes - 1) / kLanes * kLanes); }

/// sum of v[i] * w[i]; n is a multiple of kLanes
template <class T>
NRL_INLINE double lane_dot(const T* __restrict v, const T* __restrict w, int n) {
  T acc[kLanes] = {};
  for (int i = 0; i < n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) acc[l] += v[i + l] * w[i + l];
  double total = 0;
  for (int l = 0; l < kLanes; ++l) total += static_cast<double>(acc[l]);
  return total;
}

template <class T>
NRL_INLINE double lane_sum(const T* __restrict v, int n) {
  T acc[kLanes] = {};
  for (int i = 0; i < n; i += kLanes)
    for (int l = 0; l < kLanes; ++l) acc[l] += v[i + l];
  double total = 0;
  for (int l = 0; l < kLanes; ++l) total += static_cast<double>(acc[l]);
  return total;
}

/// Smallest and largest v[i] with w[i] != 0, folded into lo and hi.
template <class T>
NRL_INLINE void lane_extrema(const T* __restrict v, const T* __restrict w, int n, double& lo, double& hi) {
  const T huge = static_cast<T>(HUGE_VAL);
  T low[kLanes], high[kLanes];
  for (int l = 0; l < kLanes; ++l) low[l] = huge, high[l] = -huge;
  for (int i = 0; i < n; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const T a = w[i + l] != T(0) ? v[i + l] : huge, b = w[i + l] != T(0) ? v[i + l] : -huge;
      low[l] = a < low[l] ? a : low[l];
      high[l] = b > high[l] ? b : high[l];
    }
  }
  for (int l = 0; l < kLanes; ++l) {
    lo = low[l] < lo ? low[l] : lo;
    hi = high[l] > hi ? high[l] : hi;
  }
}

/// dst = src where the mask is not 0, else 0; the rest of the last lane group is 0 as well.
template <class T>
NRL_INLINE void load_masked(const T* __restrict src, const T* __restrict mask, int n, T* __restrict dst) {
  for (int i = 0; i < n; ++i) dst[i] = mask[i] != T(0) ? src[i] : T(0);
  for (int i = n; i < padded_to_lanes(n); ++i) dst[i] = T(0);
}

}  // namespace nemo_rl::kernels
