// Log-probabilities of tokens over the logits that top-k and top-p keep in a row, and their gradient. They are
// bit-identical to those of the sampler (kernels/sampling.h).
#pragma once
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/log_softmax.h"

namespace nemo_rl::model {

/// The sampler's settings, under which tokens are scored. logprob = log_softmax(logits / temperature over the kept
/// tokens).
struct TokenScoring {
  double temperature = 1;  ///< > 0
  float top_p = 1;         ///< in (0, 1]; 1: off
  std::int64_t top_k = 0;  ///< <= 0: off

  bool filters(std::int64_t V) const { return (top_k > 0 && top_k < V) || top_p < 1; }
};

template <class A>
using LogSumExpOf = std::conditional_t<std::is_same_v<A, double>, kernels::LogSumExpF64, kernels::LogSumExp>;

inline float token_logprob(float logit, float temperature, const LogSumExpOf<float>& lse) {
  return kernels::token_logprob(logit, temperature, lse);
}
inline double token_logprob(double logit, double temperature, const LogSumExpOf<double>& lse) {
  return kernels::token_logprob_f64(logit, temperature, lse);
}

/// The entries of one row that top-k and top-p keep, in vocabulary order. The arrays belong to the calling thread and
/// are valid until it filters its next row.
template <class A>
struct FilteredRow {
  const A* logits = nullptr;
  const std::int32_t* ids = nullptr;
  std::int64_t count = 0;  ///< 0: the row has a NaN or +inf, or all its entries are -inf
  A temperature = 1;
  LogSumExpOf<A> lse;

  bool keeps(std::int64_t token) const;
  /// Returns -inf if the token was removed, NaN if the row is not finite. `logit` is the token's logit.
  A logprob(std::int64_t token, A logit) const;
  /// out[v] += sum_i g[i] d logprob(targets[i]) / d logits[v]. Removed targets contribute nothing, and removed entries
  /// get no gradient.
  void add_gradient(const std::int64_t* targets, const A* g, std::int64_t n, A* out) const;
};

/// float: the sampler's implementation. double: the same rule, implemented by sorting, for gradient checks.
template <class A>
FilteredRow<A> filtered_row(const A* logits, std::int64_t V, const TokenScoring& scoring);
template <>
FilteredRow<float> filtered_row(const float* logits, std::int64_t V, const TokenScoring& scoring);
template <>
FilteredRow<double> filtered_row(const double* logits, std::int64_t V, const TokenScoring& scoring);

extern template struct FilteredRow<float>;
extern template struct FilteredRow<double>;

}  // namespace nemo_rl::model
