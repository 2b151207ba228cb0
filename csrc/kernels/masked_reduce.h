// Moments over the valid tokens of a batch, and the whitening built on them. A row leaves (count, mean, sum of squared
// deviations); rows are merged in order (Chan, Golub and LeVeque, 1979), so that no thread count changes a bit and a
// large common offset costs no digits.
#pragma once
#include "common/cpu_capability.h"
#include "kernels/elementwise_math.h"
#include "kernels/matrix_view.h"

namespace nemo_rl::kernels {

struct Moments {
  double count = 0;  ///< sum of the mask
  double mean = 0;
  double m2 = 0;  ///< sum of mask * (value - mean)^2
};

NRL_INLINE Moments merge_moments(const Moments& a, const Moments& b) {
  if (b.count == 0) return a;
  if (a.count == 0) return b;
  const double count = a.count + b.count, delta = b.mean - a.mean;
  return {count, a.mean + delta * (b.count / count), a.m2 + b.m2 + delta * delta * (a.count * b.count / count)};
}

/// How values become (value - mean) * scale.
enum class WhitenRule {
  biased_clamped = 0,  ///< var = m2 / n, scale = 1 / sqrt(max(var, 1e-8)): Reinforce++ and raw_reward
  unbiased_added = 1,  ///< masked_mean with its 1e-8, var * n / (n - 1), scale = 1 / sqrt(var + 1e-8): GAE
};

struct WhitenScale {
  double mean = 0;
  double scale = 0;
  double degenerate = 0;  ///< 1: no spread can be measured (nothing valid, or one value); everything becomes 0
};

template <class T>
NRL_INLINE WhitenScale whiten_scale(WhitenRule rule, const Moments& m) {
  WhitenScale out;
  if (m.count == 0 || (rule == WhitenRule::unbiased_added && m.count <= 1)) {
    out.degenerate = 1;
    return out;
  }
  if (rule == WhitenRule::biased_clamped) {
    const double var = m.m2 / m.count;
    out.mean = m.mean;
    out.scale = 1.0 / sqrt(var < 1e-8 ? 1e-8 : var);
    out.degenerate = m.count <= 1 ? 1 : 0;  // the one value is its own mean: 0 already
    return out;
  }
  const double inverse = reciprocal_count<T>(m.count);
  out.mean = m.mean * m.count * inverse;
  const double shift = m.mean - out.mean;
  const double var = (m.m2 + m.count * shift * shift) * inverse * (m.count / (m.count - 1));
  out.scale = 1.0 / sqrt(var + 1e-8);
  return out;
}

template <class T>
struct MaskedArgs {
  std::int64_t num_rows = 0;
  std::int64_t num_tokens = 0;
  T* values = nullptr;  ///< [B, S] contiguous
  MatrixView<T> mask;
  const std::int64_t* offsets = nullptr;  ///< without padding (kernels/token_rows.h); the CPU alone
};

template <class T>
using MomentsKernel = void(const MaskedArgs<T>&, std::int64_t begin, std::int64_t end, Moments* rows);
NRL_DECLARE_CPU_KERNEL(masked_moments_f32, MomentsKernel<float>);
NRL_DECLARE_CPU_KERNEL(masked_moments_f64, MomentsKernel<double>);

/// values = (values - mean) * scale, in place; 0 where the mask is 0 if `zero_masked`.
template <class T>
using WhitenKernel = void(const MaskedArgs<T>&, const WhitenScale&, bool zero_masked, std::int64_t begin,
                          std::int64_t end);
NRL_DECLARE_CPU_KERNEL(whiten_f32, WhitenKernel<float>);
NRL_DECLARE_CPU_KERNEL(whiten_f64, WhitenKernel<double>);

}  // namespace nemo_rl::kernels
