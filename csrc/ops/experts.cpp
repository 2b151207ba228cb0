#include "ops/experts.h"

#include <cmath>
#include <limits>
#include <vector>

#include "ops/kernel_types.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {
namespace {

constexpr std::int64_t kValuesAtOnce = 16384;  ///< of rows that one thread takes

/// Calls f(row) for all rows of `columns` values.
template <class F>
void for_rows(std::int64_t rows, std::int64_t columns, const F& f) {
  runtime::parallel_rows(rows, std::max<std::int64_t>(1, kValuesAtOnce / std::max<std::int64_t>(1, columns)),
                         [&](std::int64_t begin, std::int64_t end) {
                           for (std::int64_t r = begin; r < end; ++r) f(r);
                         });
}

/// Calls f with a value of the type of `sums`, float or double.
template <class F>
void dispatch_sums(const at::Tensor& sums, const char* op, const F& f) {
  if (sums.scalar_type() == at::kFloat) return f(float{});
  NRL_CHECK_ARG(sums.scalar_type() == at::kDouble, op, ": sums are float32 or float64, not ", sums.scalar_type());
  f(double{});
}

/// One token: the chosen experts in descending order of their logits, or of other values.
template <class A>
void choose_experts(const A* logits, std::int64_t E, std::int64_t k, std::int64_t* chosen) {
  for (std::int64_t j = 0; j < k; ++j) {
    std::int64_t best = -1;
    for (std::int64_t e = 0; e < E; ++e) {
      if (best >= 0 && !(logits[e] > logits[best])) continue;
      if (std::find(chosen, chosen + j, e) == chosen + j) best = e;
    }
    chosen[j] = best;
  }
}

/// The sum under a softmax over all logits, of which `most` is the highest.
template <class A>
A sum_of_exps(const A* logits, std::int64_t E, A most) {
  A sum = 0;
  for (std::int64_t e = 0; e < E; ++e) sum += std::exp(logits[e] - most);
  return sum;
}

template <class A>
A sigmoid(A x) {
  return A(1) / (A(1) + std::exp(-x));
}

/// The values of experts outside the `chosen` groups become -infinity.
template <class A>
void keep_chosen_groups(std::vector<A>& values, std::int64_t groups, std::int64_t chosen) {
  const auto size = static_cast<std::int64_t>(values.size()) / groups;
  std::vector<A> sums;
  for (std::int64_t g = 0; g < groups; ++g) {
    std::int64_t best[2];
    choose_experts(values.data() + g * size, size, 2, best);
    sums.push_back(values[static_cast<std::size_t>(g * size + best[0])] +
                   values[static_cast<std::size_t>(g * size + best[1])]);
  }
  std::vector<std::int64_t> kept(static_cast<std::size_t>(chosen));
  choose_experts(sums.data(), groups, chosen, kept.data());
  for (std::int64_t g = 0; g < groups; ++g)
    if (std::ranges::find(kept, g) == kept.end())
      std::fill_n(values.begin() + g * size, size, -std::numeric_limits<A>::infinity());
}

void check_routes(const at::Tensor& logits, const at::Tensor& expert, const at::Tensor& weight) {
  NRL_CHECK_ARG(logits.is_cpu() && logits.dim() == 2 && logits.is_contiguous() && expert.dim() == 2 &&
                    expert.is_contiguous() && expert.scalar_type() == at::kLong && expert.size(0) == logits.size(0) &&
                    expert.size(1) >= 1 && expert.size(1) <= logits.size(1) && weight.sizes() == expert.sizes() &&
                    weight.is_contiguous() && weight.scalar_type() == logits.scalar_type(),
                "route_tokens: logits ", logits.sizes(), " and experts ", expert.sizes(), " do not match");
}

}  // namespace

void route_tokens(const at::Tensor& logits, bool renormalise, const at::Tensor& expert, const at::Tensor& weight) {
  check_routes(logits, expert, weight);
  const std::int64_t E = logits.size(1), k = expert.size(1);
  dispatch_sums(logits, "route_tokens", [&](auto tag) {
    using A = decltype(tag);
    for_rows(logits.size(0), E * k, [&](std::int64_t t) {
      const A* row = ptr<A>(logits) + t * E;
      auto* chosen = mutable_ptr<std::int64_t>(expert) + t * k;
      A* w = mutable_ptr<A>(weight) + t * k;
      choose_experts(row, E, k, chosen);
      const A most = row[chosen[0]];
      A sum = 0;
      for (std::int64_t j = 0; j < k; ++j) sum += w[j] = std::exp(row[chosen[j]] - most);
      if (!renormalise) sum = sum_of_exps(row, E, most);
      for (std::int64_t j = 0; j < k; ++j) w[j] /= sum;
    });
  });
}

void route_tokens_backward(const at::Tensor& logits, bool renormalise, const at::Tensor& expert,
                           const at::Tensor& weight, const at::Tensor& d_weight, const at::Tensor& d_logits) {
  check_routes(logits, expert, weight);
  const std::int64_t E = logits.size(1), k = expert.size(1);
  dispatch_sums(logits, "route_tokens_backward", [&](auto tag) {
    using A = decltype(tag);
    for_rows(logits.size(0), E, [&](std::int64_t t) {
      const A *row = ptr<A>(logits) + t * E, *w = ptr<A>(weight) + t * k, *dw = ptr<A>(d_weight) + t * k;
      const auto* chosen = ptr<std::int64_t>(expert) + t * k;
      A* out = mutable_ptr<A>(d_logits) + t * E;
      A mean = 0;
      for (std::int64_t j = 0; j < k; ++j) mean += w[j] * dw[j];
      const A most = row[chosen[0]], sum = renormalise ? A(1) : sum_of_exps(row, E, most);
      for (std::int64_t e = 0; e < E; ++e) out[e] = renormalise ? A(0) : -mean * (std::exp(row[e] - most) / sum);
      for (std::int64_t j = 0; j < k; ++j) out[chosen[j]] = w[j] * (dw[j] - mean);
    });
  });
}

void route_tokens_by_sigmoid(const at::Tensor& logits, const at::Tensor& bias, const SigmoidRouter& router,
                             const at::Tensor& expert, const at::Tensor& weight) {
  check_routes(logits, expert, weight);
  const std::int64_t E = logits.size(1), k = expert.size(1), G = router.groups;
  NRL_CHECK_ARG(bias.is_contiguous() && bias.numel() == E && bias.scalar_type() == logits.scalar_type(),
                "route_tokens_by_sigmoid: a bias ", bias.sizes(), " for ", E, " experts");
  NRL_CHECK_ARG(G >= 1 && E % G == 0 && (G == 1 || E / G >= 2) && router.chosen_groups >= 1 &&
                    router.chosen_groups <= G && k <= router.chosen_groups * (E / G),
                "route_tokens_by_sigmoid: ", k, " experts in ", router.chosen_groups, " of ", G, " groups of ", E);
  dispatch_sums(logits, "route_tokens_by_sigmoid", [&](auto tag) {
    using A = decltype(tag);
    for_rows(logits.size(0), E * k, [&](std::int64_t t) {
      const A *row = ptr<A>(logits) + t * E, *b = ptr<A>(bias);
      auto* chosen = mutable_ptr<std::int64_t>(expert) + t * k;
      A* w = mutable_ptr<A>(weight) + t * k;
      std::vector<A> values(static_cast<std::size_t>(E));
      for (std::int64_t e = 0; e < E; ++e) values[static_cast<std::size_t>(e)] = sigmoid(row[e]) + b[e];
      if (G > 1) keep_chosen_groups(values, G, router.chosen_groups);
      choose_experts(values.data(), E, k, chosen);
      A sum = 0;
      for (std::int64_t j = 0; j < k; ++j) sum += w[j] = sigmoid(row[chosen[j]]);
      const A factor = static_cast<A>(router.scale) / (router.renormalise ? sum + A(1e-20) : A(1));
      for (std::int64_t j = 0; j < k; ++j) w[j] *= factor;
    });
  });
}

void route_tokens_by_sigmoid_backward(const at::Tensor& logits, const SigmoidRouter& router, const at::Tensor& expert,
                                      const at::Tensor& weight, const at::Tensor& d_weight,
                                      const at::Tensor& d_logits) {
  check_routes(logits, expert, weight);
  const std::int64_t E = logits.size(1), k = expert.size(1);
  dispatch_sums(logits, "route_tokens_by_sigmoid_backward", [&](auto tag) {
    using A = decltype(tag);
    for_rows(logits.size(0), E, [&](std::int64_t t) {
      const A *row = ptr<A>(logits) + t * E, *w = ptr<A>(weight) + t * k, *dw = ptr<A>(d_weight) + t * k;
      const auto* chosen = ptr<std::int64_t>(expert) + t * k;
      A* out = mutable_ptr<A>(d_logits) + t * E;
      A sum = 0, mean = 0;
      for (std::int64_t j = 0; j < k; ++j) sum += sigmoid(row[chosen[j]]), mean += w[j] * dw[j];
      if (router.renormalise) sum += A(1e-20);
      else sum = 1, mean = 0;
      std::fill(out, out + E, A(0));
      for (std::int64_t j = 0; j < k; ++j) {
        const A score = sigmoid(row[chosen[j]]);
        out[chosen[j]] = (static_cast<A>(router.scale) * dw[j] - mean) / sum * score * (A(1) - score);
      }
    });
  });
}

void sigmoid_gate(const at::Tensor& logit, const at::Tensor& gate) {
  dispatch_sums(logit, "sigmoid_gate", [&](auto tag) {
    using A = decltype(tag);
    for (std::int64_t t = 0; t < logit.numel(); ++t) mutable_ptr<A>(gate)[t] = sigmoid(ptr<A>(logit)[t]);
  });
}

void sigmoid_gate_backward(const at::Tensor& gate, const at::Tensor& d_gate) {
  dispatch_sums(gate, "sigmoid_gate_backward", [&](auto tag) {
    using A = decltype(tag);
    for (std::int64_t t = 0; t < gate.numel(); ++t) {
      const A g = ptr<A>(gate)[t];
      mutable_ptr<A>(d_gate)[t] *= g * (A(1) - g);
    }
  });
}

ExpertGroups group_by_expert(const at::Tensor& expert, std::int64_t num_experts) {
  const std::int64_t pairs = expert.numel(), k = expert.size(1);
  ExpertGroups groups{std::vector<std::int64_t>(static_cast<std::size_t>(num_experts) + 1),
                      at::empty({pairs}, at::kLong), at::empty({pairs}, at::kLong), at::empty({pairs}, at::kLong)};
  const auto* of = ptr<std::int64_t>(expert);
  for (std::int64_t p = 0; p < pairs; ++p) ++groups.begin[static_cast<std::size_t>(of[p]) + 1];
  for (std::size_t e = 0; e < static_cast<std::size_t>(num_experts); ++e) groups.begin[e + 1] += groups.begin[e];
  auto next = groups.begin;
  for (std::int64_t p = 0; p < pairs; ++p) {
    const std::int64_t row = next[static_cast<std::size_t>(of[p])]++;
    mutable_ptr<std::int64_t>(groups.pair)[row] = p;
    mutable_ptr<std::int64_t>(groups.token)[row] = p / k;
    mutable_ptr<std::int64_t>(groups.row)[p] = row;
  }
  return groups;
}

void add_up_experts(const at::Tensor& rows, const at::Tensor& row, const at::Tensor& weight, std::int64_t k,
                    const at::Tensor& y, bool accumulate) {
  const std::int64_t T = y.size(0), D = y.size(1);
  NRL_CHECK_ARG(rows.is_contiguous() && y.is_contiguous() && rows.size(0) == T * k && rows.size(1) == D &&
                    rows.scalar_type() == y.scalar_type() && (!weight.defined() || weight.numel() == T * k),
                "add_up_experts: rows ", rows.sizes(), " of ", k, " experts and y ", y.sizes(), " do not match");
  constexpr std::int64_t kBlock = 256;  // of a sum, on the stack
  dispatch_sums(y, "add_up_experts", [&](auto tag) {
    using A = decltype(tag);
    for_rows(T, k * D, [&](std::int64_t t) {
      for (std::int64_t d = 0; d < D; d += kBlock) {
        const std::int64_t n = std::min(kBlock, D - d);
        A sum[kBlock];
        for (std::int64_t j = 0; j < k; ++j) {
          const std::int64_t p = t * k + j, r = row.defined() ? ptr<std::int64_t>(row)[p] : p;
          const A* from = ptr<A>(rows) + r * D + d;
          const A w = weight.defined() ? ptr<A>(weight)[p] : A(1);
          if (j == 0) {
            for (std::int64_t i = 0; i < n; ++i) sum[i] = w * from[i];
          } else {
            for (std::int64_t i = 0; i < n; ++i) sum[i] += w * from[i];
          }
        }
        A* to = mutable_ptr<A>(y) + t * D + d;
        for (std::int64_t i = 0; i < n; ++i) to[i] = accumulate ? to[i] + sum[i] : sum[i];
      }
    });
  });
}

void row_products(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  constexpr std::int64_t kSums = 8;
  const std::int64_t C = a.size(1);
  dispatch_floating(a.scalar_type(), "row_products", [&](auto tag) {
    using S = decltype(tag);
    using A = accumulate_t<S>;
    for_rows(a.size(0), C, [&](std::int64_t r) {
      const S *x = ptr<S>(a) + r * C, *y = ptr<S>(b) + r * C;
      A sums[kSums] = {};
      for (std::int64_t c = 0; c < C; ++c) sums[c % kSums] += static_cast<A>(x[c]) * static_cast<A>(y[c]);
      A sum = 0;
      for (const A part : sums) sum += part;
      mutable_ptr<A>(out)[r] = sum;
    });
  });
}

void scale_rows(const at::Tensor& x, const at::Tensor& factor) {
  const std::int64_t C = x.size(1);
  dispatch_floating(x.scalar_type(), "scale_rows", [&](auto tag) {
    using S = decltype(tag);
    using A = accumulate_t<S>;
    for_rows(x.size(0), C, [&](std::int64_t r) {
      const A w = ptr<A>(factor)[r];
      S* row = mutable_ptr<S>(x) + r * C;
      for (std::int64_t c = 0; c < C; ++c) row[c] = static_cast<S>(w * static_cast<A>(row[c]));
    });
  });
}

}  // namespace nemo_rl::ops
