#include "kernels/value_loss.h"

#include "kernels/cpu/vec.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kTile = 256;  ///< tokens a tile: its arrays stay in the first-level cache

int padded_to_lanes(std::int64_t n) { return static_cast<int>((n + kLanes - 1) / kLanes * kLanes); }

/// The sum of v[i] * w[i], and that of v[i]: lane by lane, then the lanes in order; n is a multiple of kLanes.
template <class T>
NRL_VEC double lane_dot(const T* v, const T* w, int n) {
  Vec<T> sums(0);
  for (int i = 0; i < n; i += kLanes) sums += load<Vec<T>>(v + i) * load<Vec<T>>(w + i);
  return sum_ascending(sums);
}
template <class T>
NRL_VEC double lane_sum(const T* v, int n) {
  Vec<T> sums(0);
  for (int i = 0; i < n; i += kLanes) sums += load<Vec<T>>(v + i);
  return sum_ascending(sums);
}

/// The smallest and the largest v[i] with w[i] != 0, folded into lo and hi.
template <class T>
NRL_VEC void lane_extrema(const T* v, const T* w, int n, double& lo, double& hi) {
  Vec<T> huge(HUGE_VAL), low = huge, high = -huge;
  for (int i = 0; i < n; i += kLanes) {
    Vec<T> x = load<Vec<T>>(v + i);
    const auto valid = load<Vec<T>>(w + i) != Vec<T>(0);
    low = min_of(select(valid, x, huge), low);
    high = max_of(select(valid, x, -huge), high);
  }
  T lows[kLanes], highs[kLanes];
  store(lows, low);
  store(highs, high);
  for (int l = 0; l < kLanes; ++l) {
    lo = lows[l] < lo ? lows[l] : lo;
    hi = highs[l] > hi ? highs[l] : hi;
  }
}

/// dst = src where the mask is not 0, else 0; the rest of the last lanes is 0 as well.
template <class T>
NRL_VEC void load_masked(const T* __restrict src, const T* __restrict mask, int n, T* __restrict dst) {
  for (int i = 0; i < n; ++i) dst[i] = mask[i] != T(0) ? src[i] : T(0);
  for (int i = n; i < padded_to_lanes(n); ++i) dst[i] = T(0);
}

template <class T>
struct Tile {
  alignas(64) T v[kTile], target[kTile], old[kTile], mask[kTile], error[kTile], slope[kTile], clipped[kTile],
      square[kTile];
};

template <class T>
void reduce_tile(Tile<T>& t, int n, double* row) {
  row[kSquares] += lane_dot(t.error, t.mask, n);
  row[kClipped] += lane_dot(t.clipped, t.mask, n);
  row[kReturns] += lane_dot(t.target, t.mask, n);
  row[kValues] += lane_dot(t.v, t.mask, n);
  lane_extrema(t.v, t.mask, n, row[kValueMin], row[kValueMax]);
  for (int i = 0; i < n; ++i) t.square[i] = t.target[i] * t.target[i];
  row[kReturnsSquared] += lane_dot(t.square, t.mask, n);
  for (int i = 0; i < n; ++i) t.square[i] = (t.target[i] - t.v[i]) * (t.target[i] - t.v[i]);
  row[kResidualSquared] += lane_dot(t.square, t.mask, n);
}

template <class T>
void run_row(const ValueLossArgs<T>& a, const ValueLossConfig& c, T weight, std::int64_t b, double* row) {
  for (int i = 0; i < kValueRowSize; ++i) row[i] = merge_identity(value_loss_merge(i));
  const T sample = a.sample_mask[b], cliprange = static_cast<T>(c.cliprange);
  T* grad = a.grad + b * a.num_tokens;
  Tile<T> tile;
  for (std::int64_t start = 0; start < a.num_tokens; start += kTile) {
    const std::int64_t left = a.num_tokens - start;
    const int n = left < kTile ? static_cast<int>(left) : kTile, padded = padded_to_lanes(n);
    const T* mask = a.token_mask.row(b) + start;
    for (int i = 0; i < padded; ++i) tile.mask[i] = i < n ? mask[i] * sample : T(0);
    load_masked(a.values.row(b) + start, tile.mask, n, tile.v);
    load_masked(a.returns.row(b) + start, tile.mask, n, tile.target);
    if (cliprange > T(0)) load_masked(a.old_values.row(b) + start, tile.mask, n, tile.old);
    else
      for (int i = 0; i < padded; ++i) tile.old[i] = T(0);
    for (int i = 0; i < padded; ++i) {
      const ValueTerm<T> term = value_term(tile.v[i], tile.target[i], tile.old[i], cliprange);
      tile.error[i] = term.error;
      tile.slope[i] = tile.mask[i] * (term.slope * weight);
      tile.clipped[i] = term.clipped;
    }
    reduce_tile(tile, padded, row);
    for (int i = 0; i < n; ++i) grad[start + i] = tile.slope[i];
    if (is_finite(row[kSquares] + lane_sum(tile.slope, padded)) || row[kFirstBadValue] < HUGE_VAL) continue;
    for (int i = n - 1; i >= 0; --i)
      if (tile.mask[i] != T(0) && !(is_finite(tile.error[i]) && is_finite(tile.slope[i])))
        row[kFirstBadValue] = static_cast<double>(b * a.num_tokens + start + i);
  }
}

template <class T>
void run(const ValueLossArgs<T>& a, const ValueLossConfig& c, std::int64_t begin, std::int64_t end, double* rows) {
  const T weight = static_cast<T>(0.5 * c.scale * reciprocal_count<T>(*a.global_valid_toks));
  for (std::int64_t b = begin; b < end; ++b) run_row(a, c, weight, b, rows + b * kValueRowSize);
}

}  // namespace

void value_loss_f32(const ValueLossArgs<float>& a, const ValueLossConfig& c, std::int64_t begin, std::int64_t end,
                    double* rows) {
  run(a, c, begin, end, rows);
}
void value_loss_f64(const ValueLossArgs<double>& a, const ValueLossConfig& c, std::int64_t begin, std::int64_t end,
                    double* rows) {
  run(a, c, begin, end, rows);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
