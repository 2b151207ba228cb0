#include "model/lm_head.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "kernels/logprob_backward.h"
#include "ops/kernel_types.h"
#include "ops/linear.h"

namespace nemo_rl::model {
namespace {

/// Logits of `count` rows: float32 (float64 for the float64 build).
at::Tensor chunk_logits(const Decoder& decoder, const at::Tensor& normed, std::int64_t begin, std::int64_t count, Workspace& workspace) {
  auto logits = workspace.take("logits", {count, decoder.config().vocab_size}, decoder.accumulate_dtype());
  ops::linear_forward(normed.narrow(0, begin, count), decoder.parameters().lm_head, std::nullopt, logits);
  return logits;
}

/// d_logits of one row: -sum(g) · softmax / temperature, and g / temperature at every target.
template <class O>
void row_gradient(const float* logits, std::int64_t V, float temperature, const kernels::LogSumExp& lse, const std::int64_t* targets,
                  const float* g, std::int64_t n, O* out) {
  float total = 0;
  for (std::int64_t i = 0; i < n; ++i) total += g[i];
  if constexpr (std::is_same_v<O, float>) kernels::logprob_backward_row_f32(logits, V, temperature, lse, total, out);
  if constexpr (std::is_same_v<O, bfloat16>) kernels::logprob_backward_row_bf16(logits, V, temperature, lse, total, out);
  for (std::int64_t i = 0; i < n; ++i) {
    float own = 0;  // all pairs with this target: the entry is rounded once
    for (std::int64_t j = 0; j < n; ++j)
      if (targets[j] == targets[i]) own += g[j];
    const float p = std::exp((logits[targets[i]] / temperature - lse.max) - lse.log_sum);
    out[targets[i]] = static_cast<O>((own - total * p) / temperature);
  }
}

void row_gradient(const double* logits, std::int64_t V, double temperature, const kernels::LogSumExpF64& lse, const std::int64_t* targets,
                  const double* g, std::int64_t n, double* out) {
  double total = 0;
  for (std::int64_t i = 0; i < n; ++i) total += g[i];
  for (std::int64_t v = 0; v < V; ++v) out[v] = -total / temperature * std::exp((logits[v] / temperature - lse.max) - lse.log_sum);
  for (std::int64_t i = 0; i < n; ++i) out[targets[i]] += g[i] / temperature;
}

kernels::LogSumExp log_sum_exp(const float* row, std::int64_t V, float temperature) { return kernels::log_sum_exp_row(row, V, temperature, false); }
kernels::LogSumExpF64 log_sum_exp(const double* row, std::int64_t V, double temperature) {
  return kernels::log_sum_exp_row_f64(row, V, temperature, false);
}
float token_logprob(float logit, float temperature, const kernels::LogSumExp& lse) { return kernels::token_logprob(logit, temperature, lse); }
double token_logprob(double logit, double temperature, const kernels::LogSumExpF64& lse) { return kernels::token_logprob_f64(logit, temperature, lse); }

/// f with a value of the type that the residual stream `h` and the logits have: float, or double in the float64 build.
template <class F>
void with_accumulate_type(const at::Tensor& h, F&& f) {
  h.scalar_type() == at::kDouble ? f(double{}) : f(float{});
}

}  // namespace

std::int64_t LmHead::chunk_rows(std::int64_t vocab_size) { return std::clamp<std::int64_t>((std::int64_t{1} << 24) / vocab_size, 16, 1024); }

/// Pairs of each row: pair_row is non-decreasing.
std::vector<LmHead::PairRange> LmHead::pairs_of_rows(const TokenQuery& q) {
  std::vector<PairRange> ranges(q.rows.size(), {0, 0});
  for (std::size_t i = 0; i < q.pair_row.size(); ++i) {
    auto& r = ranges[static_cast<std::size_t>(q.pair_row[i])];
    if (r.end == 0) r.begin = static_cast<std::int64_t>(i);
    r.end = static_cast<std::int64_t>(i) + 1;
  }
  return ranges;
}

PairValues LmHead::forward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const TokenScoring& scoring,
                           bool with_unfiltered, Workspace& workspace) {
  rows_.gather(decoder, h, query, workspace);
  const std::int64_t U = rows_.size(), V = decoder.config().vocab_size, C = chunk_rows(V);
  for (auto target : query.targets) NRL_CHECK_ARG(target >= 0 && target < V, "token id ", target, " is outside the vocabulary of ", V);
  const bool filters = scoring.filters(V), plain = !filters || with_unfiltered;
  PairValues values{at::empty({static_cast<std::int64_t>(query.targets.size())}, h.options()), {}};
  if (filters && with_unfiltered) values.unfiltered = at::empty_like(values.logprobs);
  max_.resize(static_cast<std::size_t>(U));
  log_sum_.resize(static_cast<std::size_t>(U));
  const auto pairs = pairs_of_rows(query);
  for (std::int64_t begin = 0; begin < U; begin += C) {
    const std::int64_t count = std::min(C, U - begin);
    const auto logits = chunk_logits(decoder, rows_.normed(), begin, count, workspace);
    with_accumulate_type(h, [&](auto tag) {
      using A = decltype(tag);
      const A temperature = static_cast<A>(scoring.temperature);
      A* const filtered_out = filters ? ops::mutable_ptr<A>(values.logprobs) : nullptr;
      A* const plain_out = !plain ? nullptr : ops::mutable_ptr<A>(filters ? values.unfiltered : values.logprobs);
      at::parallel_for(0, count, 1, [&](std::int64_t first, std::int64_t last) {
        for (std::int64_t r = first; r < last; ++r) {
          const auto u = static_cast<std::size_t>(begin + r);
          const A* row = ops::ptr<A>(logits) + r * V;
          const auto logit = [&](std::int64_t i) { return row[query.targets[static_cast<std::size_t>(i)]]; };
          if (plain) {
            const auto lse = log_sum_exp(row, V, temperature);
            max_[u] = lse.max, log_sum_[u] = lse.log_sum;
            for (std::int64_t i = pairs[u].begin; i < pairs[u].end; ++i) plain_out[i] = token_logprob(logit(i), temperature, lse);
          }
          if (filters) {
            const auto kept = filtered_row(row, V, scoring);
            for (std::int64_t i = pairs[u].begin; i < pairs[u].end; ++i)
              filtered_out[i] = kept.logprob(query.targets[static_cast<std::size_t>(i)], logit(i));
          }
        }
      });
    });
  }
  return values;
}

void LmHead::chunk_gradient(const TokenQuery& query, const std::vector<PairRange>& pairs, const PairValues& d_values,
                            const TokenScoring& scoring, std::int64_t begin, const at::Tensor& logits, const at::Tensor& d_logits) const {
  const std::int64_t count = logits.size(0), V = logits.size(1);
  const bool filters = scoring.filters(V);
  ops::dispatch_floating(d_logits.scalar_type(), "lm_head", [&](auto tag) {
    using S = decltype(tag);
    using A = accumulate_t<S>;
    const A temperature = static_cast<A>(scoring.temperature);
    const A* const g_kept = filters ? ops::ptr<A>(d_values.logprobs) : nullptr;
    const auto& d_plain = filters ? d_values.unfiltered : d_values.logprobs;
    const A* const g_plain = d_plain.defined() ? ops::ptr<A>(d_plain) : nullptr;
    at::parallel_for(0, count, 1, [&](std::int64_t first, std::int64_t last) {
      std::vector<A> sum(filters ? static_cast<std::size_t>(V) : 0);
      for (std::int64_t r = first; r < last; ++r) {
        const auto u = static_cast<std::size_t>(begin + r);
        const A* const row = ops::ptr<A>(logits) + r * V;
        S* const out = ops::mutable_ptr<S>(d_logits) + r * V;
        const std::int64_t p = pairs[u].begin, n = pairs[u].end - p;
        const std::int64_t* const targets = query.targets.data() + p;
        const LogSumExpOf<A> lse{static_cast<A>(max_[u]), static_cast<A>(log_sum_[u]), 0};
        if (!filters) {
          row_gradient(row, V, temperature, lse, targets, g_plain + p, n, out);
          continue;
        }
        if (g_plain) {
          row_gradient(row, V, temperature, lse, targets, g_plain + p, n, sum.data());
        } else {
          std::fill(sum.begin(), sum.end(), A(0));
        }
        filtered_row(row, V, scoring).add_gradient(targets, g_kept + p, n, sum.data());
        for (std::int64_t v = 0; v < V; ++v) out[v] = static_cast<S>(sum[static_cast<std::size_t>(v)]);
      }
    });
  });
}

at::Tensor LmHead::backward(const Decoder& decoder, const at::Tensor& h, const TokenQuery& query, const PairValues& d_values,
                            const TokenScoring& scoring, const DecoderParameters& grads, Workspace& workspace) {
  const std::int64_t U = rows_.size(), V = decoder.config().vocab_size, C = chunk_rows(V);
  NRL_CHECK(U == static_cast<std::int64_t>(query.rows.size()) && static_cast<std::int64_t>(max_.size()) == U, "LmHead::backward without its forward");
  const auto pairs = pairs_of_rows(query);
  const auto d_normed = rows_.d_normed(workspace);
  for (std::int64_t begin = 0; begin < U; begin += C) {
    const std::int64_t count = std::min(C, U - begin);
    const auto logits = chunk_logits(decoder, rows_.normed(), begin, count, workspace);
    const auto d_logits = workspace.take("d_logits", {count, V}, decoder.compute_dtype());
    chunk_gradient(query, pairs, d_values, scoring, begin, logits, d_logits);
    ops::linear_backward_weight(d_logits, rows_.normed().narrow(0, begin, count), grads.lm_head);
    ops::linear_backward_input(d_logits, decoder.parameters().lm_head, d_normed.narrow(0, begin, count));
  }
  return rows_.backward(decoder, h, query, d_normed, grads, workspace);
}

}  // namespace nemo_rl::model
