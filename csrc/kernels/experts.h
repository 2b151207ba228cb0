// What a router decides for one token, and its gradient: the formulas of ops/experts.h, the same code for the threads
// of a CPU and of CUDA.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/host_device.h"

namespace nemo_rl::kernels {

/// A router whose scores are sigmoids of its logits (DeepSeek-V3, GLM-4.5, LFM2).
struct SigmoidRouter {
  std::int64_t groups = 1, chosen_groups = 1;  ///< consecutive experts are a group; experts of chosen groups are chosen
  bool renormalise = true;                     ///< divides the chosen scores by their sum
  double scale = 1;                            ///< multiplies the weights
  double epsilon = 1e-20;                      ///< added to the sum
};

/// The choices of all tokens.
template <class A>
struct TokenRoutes {
  const A* logits;          ///< [T, E]
  std::int64_t E, k;        ///< experts, and those of a token
  std::int64_t* expert;     ///< [T, k]
  A* weight;                ///< [T, k]
  const A* bias = nullptr;  ///< [E], of a sigmoid router
  A* values = nullptr;      ///< scratch of a sigmoid router: [T, E + groups], or of one token if value_stride is 0
  std::int64_t value_stride = 0;
};

/// The k experts in descending order of their values, of equal ones those with the lower number.
template <class A>
NRL_INLINE void choose_experts(const A* values, std::int64_t E, std::int64_t k, std::int64_t* chosen) {
  for (std::int64_t j = 0; j < k; ++j) {
    std::int64_t best = -1;
    for (std::int64_t e = 0; e < E; ++e) {
      if (best >= 0 && !(values[e] > values[best])) continue;
      bool is_new = true;
      for (std::int64_t i = 0; i < j && is_new; ++i) is_new = chosen[i] != e;
      if (is_new) best = e;
    }
    chosen[j] = best;
  }
}

/// The sum under a softmax over all logits, of which `most` is the highest.
template <class A>
NRL_INLINE A sum_of_exps(const A* logits, std::int64_t E, A most) {
  A sum = 0;
  for (std::int64_t e = 0; e < E; ++e) sum += std::exp(logits[e] - most);
  return sum;
}

template <class A>
NRL_INLINE A router_score(A logit) {
  return A(1) / (A(1) + std::exp(-logit));
}

template <class A>
NRL_INLINE void route_token(const TokenRoutes<A>& p, std::int64_t t, bool renormalise) {
  const A* row = p.logits + t * p.E;
  auto* chosen = p.expert + t * p.k;
  A* w = p.weight + t * p.k;
  choose_experts(row, p.E, p.k, chosen);
  const A most = row[chosen[0]];
  A sum = 0;
  for (std::int64_t j = 0; j < p.k; ++j) sum += w[j] = std::exp(row[chosen[j]] - most);
  if (!renormalise) sum = sum_of_exps(row, p.E, most);
  for (std::int64_t j = 0; j < p.k; ++j) w[j] /= sum;
}

/// d_logits [T, E] from d_weight [T, k].
template <class A>
NRL_INLINE void route_token_backward(const TokenRoutes<A>& p, std::int64_t t, bool renormalise, const A* d_weight,
                                     A* d_logits) {
  const A *row = p.logits + t * p.E, *w = p.weight + t * p.k, *dw = d_weight + t * p.k;
  const auto* chosen = p.expert + t * p.k;
  A* out = d_logits + t * p.E;
  A mean = 0;
  for (std::int64_t j = 0; j < p.k; ++j) mean += w[j] * dw[j];
  const A most = row[chosen[0]], sum = renormalise ? A(1) : sum_of_exps(row, p.E, most);
  for (std::int64_t e = 0; e < p.E; ++e) out[e] = renormalise ? A(0) : -mean * (std::exp(row[e] - most) / sum);
  for (std::int64_t j = 0; j < p.k; ++j) out[chosen[j]] = w[j] * (dw[j] - mean);
}

/// The values of experts outside the chosen groups become -infinity; `sums`: scratch of a value a group.
template <class A>
NRL_INLINE void keep_chosen_groups(A* values, std::int64_t E, const SigmoidRouter& router, A* sums) {
  const std::int64_t G = router.groups, size = E / G;
  for (std::int64_t g = 0; g < G; ++g) {
    std::int64_t best[2];
    choose_experts(values + g * size, size, 2, best);
    sums[g] = values[g * size + best[0]] + values[g * size + best[1]];
  }
  for (std::int64_t g = 0; g < G; ++g) {
    std::int64_t before = 0;  // groups that are chosen sooner
    for (std::int64_t h = 0; h < G; ++h) before += sums[h] > sums[g] || (sums[h] == sums[g] && h < g);
    if (before < router.chosen_groups) continue;
    for (std::int64_t e = g * size; e < (g + 1) * size; ++e) values[e] = static_cast<A>(-INFINITY);
  }
}

template <class A>
NRL_INLINE void route_token_by_sigmoid(const TokenRoutes<A>& p, std::int64_t t, const SigmoidRouter& router) {
  const A* row = p.logits + t * p.E;
  auto* chosen = p.expert + t * p.k;
  A *w = p.weight + t * p.k, *values = p.values + t * p.value_stride;
  for (std::int64_t e = 0; e < p.E; ++e) values[e] = router_score(row[e]) + p.bias[e];
  if (router.groups > 1) keep_chosen_groups(values, p.E, router, values + p.E);
  choose_experts(values, p.E, p.k, chosen);
  A sum = 0;
  for (std::int64_t j = 0; j < p.k; ++j) sum += w[j] = router_score(row[chosen[j]]);
  const A factor = static_cast<A>(router.scale) / (router.renormalise ? sum + A(router.epsilon) : A(1));
  for (std::int64_t j = 0; j < p.k; ++j) w[j] *= factor;
}

template <class A>
NRL_INLINE void route_token_by_sigmoid_backward(const TokenRoutes<A>& p, std::int64_t t, const SigmoidRouter& router,
                                                const A* d_weight, A* d_logits) {
  const A *row = p.logits + t * p.E, *w = p.weight + t * p.k, *dw = d_weight + t * p.k;
  const auto* chosen = p.expert + t * p.k;
  A* out = d_logits + t * p.E;
  A sum = 0, mean = 0;
  for (std::int64_t j = 0; j < p.k; ++j) sum += router_score(row[chosen[j]]), mean += w[j] * dw[j];
  if (router.renormalise) sum += A(router.epsilon);
  else sum = 1, mean = 0;
  for (std::int64_t e = 0; e < p.E; ++e) out[e] = A(0);
  for (std::int64_t j = 0; j < p.k; ++j) {
    const A score = router_score(row[chosen[j]]);
    out[chosen[j]] = (static_cast<A>(router.scale) * dw[j] - mean) / sum * score * (A(1) - score);
  }
}

/// The chains into which the terms of ops::row_products are dealt.
inline constexpr std::int64_t kRowProductChains = 8;

}  // namespace nemo_rl::kernels
