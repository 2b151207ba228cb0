// Squared error of value predictions, optionally clipped around the old ones (PPO).
//   e = (v - R)^2;  with cliprange c: e = max(e, (clamp(v, old - c, old + c) - R)^2);  loss = scale / 2 * sum(e M) /
//   tokens
// M = token_mask * sample_mask on unshifted [B, S] arrays.
#pragma once
#include "common/cpu_capability.h"
#include "kernels/elementwise_math.h"
#include "kernels/matrix_view.h"

namespace nemo_rl::kernels {

struct ValueLossConfig {
  double scale = 1.0;
  double cliprange = 0.0;  ///< 0: no clipping, the old values are not read
};

template <class T>
struct ValueLossArgs {
  std::int64_t num_rows = 0;
  std::int64_t num_tokens = 0;
  MatrixView<T> values, returns, old_values, token_mask;
  const T* sample_mask = nullptr;
  const double* global_valid_toks = nullptr;  ///< [1]
  T* grad = nullptr;                          ///< [B, S] contiguous, d loss / d values
};

enum ValueRow : int {
  kSquares,
  kClipped,
  kReturns,
  kValues,
  kReturnsSquared,
  kResidualSquared,
  kValueMin,
  kValueMax,
  kFirstBadValue,
  kValueRowSize
};
enum ValueMetric : int {
  kValueLoss,
  kVfClipfrac,
  kReturnsMean,
  kValuesMean,
  kValuesMin,
  kValuesMax,
  kReturnsSqMean,
  kResidualSqMean,
  kValueNonfiniteSample,
  kValueNonfiniteToken,
  kNumValueMetrics
};

template <class T>
struct ValueTerm {
  T error;    ///< the larger of the two squares
  T slope;    ///< d error / d v; a tie of the two shares it half and half, as torch.max does
  T clipped;  ///< 1 if the clipped square is the larger
};

template <class T>
NRL_INLINE ValueTerm<T> value_term(T v, T target, T old, T cliprange) {
  const T d = v - target;
  const T plain = d * d;
  if (!(cliprange > T(0))) return {plain, T(2) * d, T(0)};
  const T lo = old - cliprange, hi = old + cliprange;
  const T dc = clamp_to(v, lo, hi) - target;
  const T clipped = dc * dc;
  const T share = plain > clipped ? T(1) : (plain == clipped ? T(0.5) : T(0));
  const T inner = v >= lo && v <= hi ? T(2) * dc : T(0);
  return {!(plain <= clipped) ? plain : clipped, share * T(2) * d + (T(1) - share) * inner,
          clipped > plain ? T(1) : T(0)};
}

NRL_INLINE RowMerge value_loss_merge(int column) {
  if (column < kValueMin) return RowMerge::sum;
  return column == kValueMax ? RowMerge::max : RowMerge::min;
}

template <class T>
NRL_INLINE void value_loss_finalize(const double* sum, std::int64_t num_tokens, const ValueLossConfig& config,
                                    double toks, double* metrics) {
  const double w = reciprocal_count<T>(toks);
  metrics[kValueLoss] = 0.5 * config.scale * sum[kSquares] * w;
  metrics[kVfClipfrac] = sum[kClipped] * w;
  metrics[kReturnsMean] = sum[kReturns] * w;
  metrics[kValuesMean] = sum[kValues] * w;
  const bool any = sum[kValueMin] <= sum[kValueMax];
  metrics[kValuesMin] = any ? sum[kValueMin] : 0.0;
  metrics[kValuesMax] = any ? sum[kValueMax] : 0.0;
  metrics[kReturnsSqMean] = sum[kReturnsSquared] * w;
  metrics[kResidualSqMean] = sum[kResidualSquared] * w;
  const bool bad = sum[kFirstBadValue] < HUGE_VAL;
  const double row = bad ? floor(sum[kFirstBadValue] / static_cast<double>(num_tokens)) : -1.0;
  metrics[kValueNonfiniteSample] = row;
  metrics[kValueNonfiniteToken] = bad ? sum[kFirstBadValue] - row * static_cast<double>(num_tokens) : -1.0;
}

template <class T>
using ValueLossKernel = void(const ValueLossArgs<T>&, const ValueLossConfig&, std::int64_t begin, std::int64_t end,
                             double* rows);
NRL_DECLARE_CPU_KERNEL(value_loss_f32, ValueLossKernel<float>);
NRL_DECLARE_CPU_KERNEL(value_loss_f64, ValueLossKernel<double>);

}  // namespace nemo_rl::kernels
