// Per-token estimates of KL(pi || ref) from log-probabilities of sampled tokens (Schulman, "Approximating KL
// Divergence", 2020): with r = log ref - log pi,  k1 = -r,  k2 = r^2 / 2,  k3 = e^r - 1 - r.
#pragma once
#include "common/cpu_capability.h"
#include "kernels/elementwise_math.h"

namespace nemo_rl::kernels {

enum class KlEstimator { k1 = 0, k2 = 1, k3 = 2 };

/// One estimate k(r), its slope k'(r), and k - k', which for k3 is -r: taken as a difference it would lose every digit
/// of a large gap.
template <class T>
struct KlEstimate {
  T value;
  T slope;
  T value_minus_slope;
};

template <class T>
NRL_INLINE KlEstimate<T> kl_estimate(KlEstimator type, T r) {
  if (type == KlEstimator::k1) return {-r, T(-1), T(1) - r};
  if (type == KlEstimator::k2) return {r * r * T(0.5), r, r * (r * T(0.5) - T(1))};
  T value = exp_minus_linear(r);
  return {value, value + r, -r};
}

template <class T>
struct KlTerm {
  T value;      ///< clamp(w * k(clamp(r)))
  T d_r;        ///< derivative in r, the weight held fixed
  T d_weight;   ///< derivative in the weight, r held fixed
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
  out.d_r = select(inside, weight * k.slope, T(0));
  out.d_weight = select(inside, k.value, T(0));
  out.d_logprob = select(inside, weight * k.value_minus_slope, T(0));
  return out;
}

/// out[i] = K of token i; d_r and d_weight may both be null. `weights` null means 1.
template <class T>
struct KlArgs {
  std::int64_t size = 0;
  const T* logprobs = nullptr;
  const T* reference = nullptr;
  const T* weights = nullptr;
  T* out = nullptr;
  T* d_r = nullptr;
  T* d_weight = nullptr;
  KlEstimator type = KlEstimator::k3;
  double input_clamp = 20.0;
  double output_clamp = 10.0;
};

template <class T>
using KlKernel = void(const KlArgs<T>&, std::int64_t begin, std::int64_t end);
NRL_DECLARE_CPU_KERNEL(calculate_kl_f32, KlKernel<float>);
NRL_DECLARE_CPU_KERNEL(calculate_kl_f64, KlKernel<double>);

}  // namespace nemo_rl::kernels
