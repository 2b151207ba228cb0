#include "model/filtered_row.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ops/sampling.h"

namespace nemo_rl::model {
template <class A>
bool FilteredRow<A>::keeps(std::int64_t token) const {
  return std::binary_search(ids, ids + count, token);
}

template <class A>
A FilteredRow<A>::logprob(std::int64_t token, A logit) const {
  if (count == 0) return std::numeric_limits<A>::quiet_NaN();
  return keeps(token) ? token_logprob(logit, temperature, lse) : -std::numeric_limits<A>::infinity();
}

template <class A>
void FilteredRow<A>::add_gradient(const std::int64_t* targets, const A* g, std::int64_t n, A* out) const {
  A total = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (!keeps(targets[i])) continue;
    total += g[i];
    out[targets[i]] += g[i] / temperature;
  }
  if (total == 0) return;
  for (std::int64_t i = 0; i < count; ++i)
    out[ids[i]] -= total / temperature * std::exp(token_logprob(logits[i], temperature, lse));
}

template <>
FilteredRow<float> filtered_row(const float* logits, std::int64_t V, const TokenScoring& scoring) {
  const kernels::SamplingRule rule{static_cast<float>(scoring.temperature), scoring.top_p, scoring.top_k, false};
  const auto scratch = ops::thread_filter_scratch(V);
  FilteredRow<float> row{
      scratch.logits, scratch.ids, kernels::filter_row(logits, V, rule, scratch), rule.temperature, {}};
  if (row.count > 0) row.lse = kernels::log_sum_exp_row(row.logits, row.count, rule.temperature, false);
  return row;
}

template <>
FilteredRow<double> filtered_row(const double* logits, std::int64_t V, const TokenScoring& scoring) {
  thread_local std::vector<std::int32_t> ids;
  thread_local std::vector<double> kept;
  FilteredRow<double> row;
  row.temperature = scoring.temperature;
  const auto all = kernels::log_sum_exp_row_f64(logits, V, scoring.temperature, false);
  if (!std::isfinite(all.log_sum)) return row;
  const auto mass = [&](std::int32_t v) { return std::exp(logits[v] / scoring.temperature - all.max); };
  ids.resize(static_cast<std::size_t>(V));
  std::iota(ids.begin(), ids.end(), 0);
  std::sort(ids.begin(), ids.end(),
            [&](auto a, auto b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a > b; });
  std::size_t n = ids.size();
  if (scoring.top_k > 0 && scoring.top_k < V) {
    n = static_cast<std::size_t>(scoring.top_k);
    while (n < ids.size() && logits[ids[n]] == logits[ids[n - 1]]) ++n;  // ties with the k-th value stay
  }
  if (scoring.top_p < 1) {
    double total = 0, sum = 0;
    for (std::size_t i = 0; i < n; ++i) total += mass(ids[i]);
    std::size_t needed = 0;
    while (needed < n && (needed == 0 || sum < scoring.top_p * total)) sum += mass(ids[needed++]);
    n = needed;
  }
  while (n > 1 && std::isinf(logits[ids[n - 1]])) --n;
  ids.resize(n);
  std::sort(ids.begin(), ids.end());
  kept.resize(n);
  std::transform(ids.begin(), ids.end(), kept.begin(), [&](auto v) { return logits[v]; });
  row.logits = kept.data(), row.ids = ids.data(), row.count = static_cast<std::int64_t>(n);
  row.lse = kernels::log_sum_exp_row_f64(row.logits, row.count, scoring.temperature, false);
  return row;
}

template struct FilteredRow<float>;
template struct FilteredRow<double>;

}  // namespace nemo_rl::model
