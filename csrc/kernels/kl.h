// Per-token estimates of KL(pi || ref) from log-probabilities of sampled tokens (Schulman, "Approximating KL
// Divergence", 2020): with r = log ref - log pi,  k1 = -r,  k2 = r^2 / 2,  k3 = e^r - 1 - r.
#pragma once
#include "common/cpu_capability.h"
#include "kernels/elementwise_math.h"

namespace nemo_rl::kernels {

enum class KlEstimator { k1 = 0, k2 = 1, k3 = 2 };

/// One estimate k(r), and k - k', which for k3 is -r: taken as a difference it would lose every digit of a large gap.
template <class T>
struct KlEstimate {
  T value;
  T value_minus_slope;
};

template <class T>
NRL_INLINE KlEstimate<T> kl_estimate(KlEstimator type, T r) {
  if (type == KlEstimator::k1) return {-r, T(1) - r};
  if (type == KlEstimator::k2) return {r * r * T(0.5), r * (r * T(0.5) - T(1))};
  return {exp_minus_linear(r), -r};
}

template <class T>
struct KlTerm {
  T value;      ///< clamp(w * k(clamp(r)))
  T d_logprob;  ///< derivative in log pi where the weight is e^(log pi - constant): the score-function term included
};

/// K = clamp(w * k(clamp(ref - logprob, +-input_clamp)), +-output_clamp). Where the input clamp acts neither r nor the
/// weight carries a gradient; where the output clamp acts nothing does. An infinite clamp is none.
template <class T>
NRL_INLINE KlTerm<T> kl_term(KlEstimator type, T logprob, T ref, T weight, T input_clamp, T output_clamp) {
  T raw = ref - logprob;
  T r = clamp_to(raw, -input_clamp, input_clamp);
  KlEstimate<T> k = kl_estimate(type, r);
  T product = weight * k.value;
  const auto inside = (r == raw) & (abs_of(product) <= output_clamp);
  KlTerm<T> out;
  out.value = clamp_to(product, -output_clamp, output_clamp);
  out.d_logprob = select(inside, weight * k.value_minus_slope, T(0));
  return out;
}

}  // namespace nemo_rl::kernels
