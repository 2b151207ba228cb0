#include "ops/experts.h"

#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sort.h>

#include <algorithm>
#include <vector>

#include "ops/kernel_types.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

runtime::CudaSlot<decltype(route_tokens)> route_tokens_cuda("route_tokens");
runtime::CudaSlot<decltype(route_tokens_backward)> route_tokens_backward_cuda("route_tokens_backward");
runtime::CudaSlot<decltype(route_tokens_by_sigmoid)> route_tokens_by_sigmoid_cuda("route_tokens_by_sigmoid");
runtime::CudaSlot<decltype(route_tokens_by_sigmoid_backward)> route_tokens_by_sigmoid_backward_cuda(
    "route_tokens_by_sigmoid_backward");
runtime::CudaSlot<decltype(add_up_experts)> add_up_experts_cuda("add_up_experts");
runtime::CudaSlot<decltype(row_products)> row_products_cuda("row_products");

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

void check_routes(const at::Tensor& logits, const at::Tensor& expert, const at::Tensor& weight) {
  NRL_CHECK_ARG(logits.device() == expert.device() && logits.device() == weight.device() && logits.dim() == 2 &&
                    logits.is_contiguous() && expert.dim() == 2 && expert.is_contiguous() &&
                    expert.scalar_type() == at::kLong && expert.size(0) == logits.size(0) && expert.size(1) >= 1 &&
                    expert.size(1) <= logits.size(1) && weight.sizes() == expert.sizes() && weight.is_contiguous() &&
                    weight.scalar_type() == logits.scalar_type(),
                "route_tokens: logits ", logits.sizes(), " and experts ", expert.sizes(), " do not match");
}

template <class A>
kernels::TokenRoutes<A> routes_of(const at::Tensor& logits, const at::Tensor& expert, const at::Tensor& weight) {
  return {ptr<A>(logits), logits.size(1), expert.size(1), mutable_ptr<std::int64_t>(expert), mutable_ptr<A>(weight)};
}

}  // namespace

void route_tokens(const at::Tensor& logits, bool renormalise, const at::Tensor& expert, const at::Tensor& weight) {
  check_routes(logits, expert, weight);
  if (logits.is_cuda()) return route_tokens_cuda.get(logits)(logits, renormalise, expert, weight);
  dispatch_sums(logits, "route_tokens", [&](auto tag) {
    const auto routes = routes_of<decltype(tag)>(logits, expert, weight);
    for_rows(logits.size(0), routes.E * routes.k,
             [&](std::int64_t t) { kernels::route_token(routes, t, renormalise); });
  });
}

void route_tokens_backward(const at::Tensor& logits, bool renormalise, const at::Tensor& expert,
                           const at::Tensor& weight, const at::Tensor& d_weight, const at::Tensor& d_logits) {
  check_routes(logits, expert, weight);
  if (logits.is_cuda())
    return route_tokens_backward_cuda.get(logits)(logits, renormalise, expert, weight, d_weight, d_logits);
  dispatch_sums(logits, "route_tokens_backward", [&](auto tag) {
    using A = decltype(tag);
    const auto routes = routes_of<A>(logits, expert, weight);
    for_rows(logits.size(0), routes.E, [&](std::int64_t t) {
      kernels::route_token_backward(routes, t, renormalise, ptr<A>(d_weight), mutable_ptr<A>(d_logits));
    });
  });
}

void balance_experts(const at::Tensor& logits, const at::Tensor& expert, ExpertBalance& balance,
                     const at::Tensor& d_logits) {
  check_routes(logits, expert, at::empty_like(expert, logits.options()));
  const std::int64_t E = logits.size(1), k = expert.size(1), sequences = std::ssize(balance.begin) - 1;
  NRL_CHECK_ARG(logits.is_cpu() && sequences >= 0 && balance.begin.front() == 0 &&
                    balance.begin.back() == logits.size(0) && d_logits.sizes() == logits.sizes() &&
                    d_logits.is_contiguous() && d_logits.scalar_type() == logits.scalar_type(),
                "balance_experts: sequences of ", balance.begin.back(), " rows for logits ", logits.sizes());
  std::vector<double> losses(static_cast<std::size_t>(sequences));
  dispatch_sums(logits, "balance_experts", [&](auto tag) {
    using A = decltype(tag);
    runtime::parallel_items(sequences, /*parallel=*/true, [&](std::int64_t s) {
      const auto begin = balance.begin[static_cast<std::size_t>(s)],
                 end = balance.begin[static_cast<std::size_t>(s) + 1];
      std::vector<A> slope(static_cast<std::size_t>(E)), p(static_cast<std::size_t>(E));
      for (std::int64_t i = begin * k; i < end * k; ++i)
        ++slope[static_cast<std::size_t>(ptr<std::int64_t>(expert)[i])];
      const double tokens = static_cast<double>(end - begin);
      const auto scale =
          static_cast<A>(balance.coefficient * static_cast<double>(E) / (static_cast<double>(k) * tokens * tokens));
      for (auto& value : slope) value *= scale;
      for (std::int64_t t = begin; t < end; ++t) {
        const A* row = ptr<A>(logits) + t * E;
        A* out = mutable_ptr<A>(d_logits) + t * E;
        const A most = *std::max_element(row, row + E), sum = kernels::sum_of_exps(row, E, most);
        A mean = 0;
        for (std::size_t e = 0; e < p.size(); ++e) mean += slope[e] * (p[e] = std::exp(row[e] - most) / sum);
        for (std::size_t e = 0; e < p.size(); ++e) out[e] += p[e] * (slope[e] - mean);
        losses[static_cast<std::size_t>(s)] += static_cast<double>(mean);
      }
    });
  });
  for (const double loss : losses) balance.loss += loss;
}

void route_tokens_by_sigmoid(const at::Tensor& logits, const at::Tensor& bias, const SigmoidRouter& router,
                             const at::Tensor& expert, const at::Tensor& weight) {
  check_routes(logits, expert, weight);
  const std::int64_t E = logits.size(1), k = expert.size(1), G = router.groups;
  NRL_CHECK_ARG(bias.is_contiguous() && bias.numel() == E && bias.scalar_type() == logits.scalar_type() &&
                    bias.device() == logits.device(),
                "route_tokens_by_sigmoid: a bias ", bias.sizes(), " for ", E, " experts");
  NRL_CHECK_ARG(G >= 1 && E % G == 0 && (G == 1 || E / G >= 2) && router.chosen_groups >= 1 &&
                    router.chosen_groups <= G && k <= router.chosen_groups * (E / G),
                "route_tokens_by_sigmoid: ", k, " experts in ", router.chosen_groups, " of ", G, " groups of ", E);
  if (logits.is_cuda()) return route_tokens_by_sigmoid_cuda.get(logits)(logits, bias, router, expert, weight);
  dispatch_sums(logits, "route_tokens_by_sigmoid", [&](auto tag) {
    using A = decltype(tag);
    for_rows(logits.size(0), E * k, [&](std::int64_t t) {
      std::vector<A> values(static_cast<std::size_t>(E + G));
      auto routes = routes_of<A>(logits, expert, weight);
      routes.bias = ptr<A>(bias), routes.values = values.data();
      kernels::route_token_by_sigmoid(routes, t, router);
    });
  });
}

void route_tokens_by_sigmoid_backward(const at::Tensor& logits, const SigmoidRouter& router, const at::Tensor& expert,
                                      const at::Tensor& weight, const at::Tensor& d_weight,
                                      const at::Tensor& d_logits) {
  check_routes(logits, expert, weight);
  if (logits.is_cuda())
    return route_tokens_by_sigmoid_backward_cuda.get(logits)(logits, router, expert, weight, d_weight, d_logits);
  dispatch_sums(logits, "route_tokens_by_sigmoid_backward", [&](auto tag) {
    using A = decltype(tag);
    const auto routes = routes_of<A>(logits, expert, weight);
    for_rows(logits.size(0), routes.E, [&](std::int64_t t) {
      kernels::route_token_by_sigmoid_backward(routes, t, router, ptr<A>(d_weight), mutable_ptr<A>(d_logits));
    });
  });
}

void sigmoid_gate(const at::Tensor& logit, const at::Tensor& gate) {
  if (logit.is_cuda()) {
    at::sigmoid_out(const_cast<at::Tensor&>(gate), logit);
    return;
  }
  dispatch_sums(logit, "sigmoid_gate", [&](auto tag) {
    using A = decltype(tag);
    for (std::int64_t t = 0; t < logit.numel(); ++t) mutable_ptr<A>(gate)[t] = kernels::router_score(ptr<A>(logit)[t]);
  });
}

void sigmoid_gate_backward(const at::Tensor& gate, const at::Tensor& d_gate) {
  if (gate.is_cuda()) {
    d_gate.mul_(gate.neg().add_(1).mul_(gate));
    return;
  }
  dispatch_sums(gate, "sigmoid_gate_backward", [&](auto tag) {
    using A = decltype(tag);
    for (std::int64_t t = 0; t < gate.numel(); ++t) {
      const A g = ptr<A>(gate)[t];
      mutable_ptr<A>(d_gate)[t] *= g * (A(1) - g);
    }
  });
}

ExpertGroups group_by_expert(const at::Tensor& expert, std::int64_t num_experts) {
  if (expert.is_cuda()) return group_by_sorting(expert, num_experts);
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

ExpertGroups group_by_sorting(const at::Tensor& expert, std::int64_t num_experts) {
  const auto [sorted, pair] = at::sort(expert.view(-1), std::optional<bool>(true), /*dim=*/0);
  ExpertGroups groups{{}, pair, pair.div(expert.size(1), "floor"), at::empty_like(pair)};
  groups.row.index_copy_(0, pair, at::arange(pair.numel(), pair.options()));  // each pair once
  const auto begin = at::searchsorted(sorted, at::arange(num_experts + 1, pair.options())).cpu();
  groups.begin.assign(ptr<std::int64_t>(begin), ptr<std::int64_t>(begin) + begin.numel());
  return groups;
}

void add_up_experts(const at::Tensor& rows, const at::Tensor& row, const at::Tensor& weight, std::int64_t k,
                    const at::Tensor& y, bool accumulate) {
  const std::int64_t T = y.size(0), D = y.size(1);
  NRL_CHECK_ARG(rows.is_contiguous() && y.is_contiguous() && rows.size(0) == T * k && rows.size(1) == D &&
                    rows.scalar_type() == y.scalar_type() && (!weight.defined() || weight.numel() == T * k),
                "add_up_experts: rows ", rows.sizes(), " of ", k, " experts and y ", y.sizes(), " do not match");
  if (y.is_cuda()) return add_up_experts_cuda.get(y)(rows, row, weight, k, y, accumulate);
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
  if (a.is_cuda()) return row_products_cuda.get(a)(a, b, out);
  constexpr std::int64_t kSums = kernels::kRowProductChains;
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
  if (x.is_cuda()) {  // in the factor's type, rounded once
    x.mul_(factor.view({-1, 1}));
    return;
  }
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
