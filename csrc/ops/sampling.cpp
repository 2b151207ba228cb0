#include "ops/sampling.h"

#include <ATen/Parallel.h>

#include <cmath>

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

decltype(sample_rows_cuda) sample_rows_cuda("sample_rows");
decltype(score_rows_cuda) score_rows_cuda("score_rows");
decltype(score_pairs_cuda) score_pairs_cuda("score_pairs");
decltype(pairs_gradient_cuda) pairs_gradient_cuda("pairs_gradient");

namespace {

at::Tensor checked_logits(const at::Tensor& logits) {
  NRL_CHECK_ARG(logits.dim() == 2 && logits.scalar_type() == at::kFloat, "logits: given ", logits.dim(),
                " dimensions of ", logits.scalar_type(), ", expected float32 [R, V]");
  NRL_CHECK_ARG(logits.size(1) >= 1 && logits.size(1) <= kernels::kMaxVocab, "logits: a vocabulary of ", logits.size(1),
                ", expected 1 to ", kernels::kMaxVocab);
  return logits.contiguous();
}

}  // namespace

kernels::FilterScratch thread_filter_scratch(std::int64_t V) {
  thread_local std::vector<kernels::FilterCandidate> candidates;
  thread_local std::vector<float> logits;
  thread_local std::vector<std::int32_t> ids;
  if (static_cast<std::int64_t>(ids.size()) < V) {
    candidates.resize(V);
    logits.resize(V);
    ids.resize(V);
  }
  return {candidates.data(), logits.data(), ids.data()};
}

void check_rule(const SamplingRule& rule) {
  NRL_CHECK_ARG(rule.greedy || (rule.temperature > 0 && std::isfinite(rule.temperature)),
                "temperature = ", rule.temperature, ": expected a positive number, or 0 for greedy decoding");
  NRL_CHECK_ARG(rule.top_p > 0 && rule.top_p <= 1, "top_p = ", rule.top_p,
                ": expected a number in (0, 1]; 1 switches it off");
}

std::vector<SampledToken> sample_rows(const at::Tensor& logits, const std::vector<RowDraw>& draws, bool with_entropy) {
  const at::Tensor x = checked_logits(logits);
  const std::int64_t R = x.size(0), V = x.size(1);
  for (const RowDraw& draw : draws) {
    NRL_CHECK_ARG(draw.logits_row >= 0 && draw.logits_row < R, "row ", draw.logits_row, " of ", R, " rows of logits");
    NRL_CHECK_ARG(draw.uniform >= 0 && draw.uniform < 1, "uniform = ", draw.uniform, ": expected [0, 1)");
    check_rule(draw.rule);
  }
  if (x.is_cuda()) return sample_rows_cuda.get(x)(x, draws, with_entropy);
  const float* data = x.const_data_ptr<float>();
  std::vector<SampledToken> out(draws.size());
  at::parallel_for(0, static_cast<std::int64_t>(draws.size()), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const RowDraw& d = draws[i];
      const auto scratch = d.rule.filters(V) ? thread_filter_scratch(V) : kernels::FilterScratch{};
      out[i] = kernels::sample_row(data + d.logits_row * V, V, d.rule, d.uniform, scratch, with_entropy);
    }
  });
  return out;
}

std::vector<SampledToken> score_rows(const at::Tensor& logits, const at::Tensor& token_ids, const SamplingRule& rule,
                                     bool with_entropy) {
  const at::Tensor x = checked_logits(logits);
  const std::int64_t R = x.size(0), V = x.size(1);
  NRL_CHECK_ARG(token_ids.dim() == 1 && token_ids.size(0) == R && token_ids.scalar_type() == at::kLong,
                "token_ids: expected int64 [", R, "], one for each row of logits");
  check_rule(rule);
  const at::Tensor ids = token_ids.to(at::kCPU).contiguous();
  const std::int64_t* tokens = ids.const_data_ptr<std::int64_t>();
  for (std::int64_t r = 0; r < R; ++r) {
    NRL_CHECK_ARG(tokens[r] >= 0 && tokens[r] < V, "token_ids[", r, "] = ", tokens[r], " with a vocabulary of ", V);
  }
  if (x.is_cuda()) return score_rows_cuda.get(x)(x, ids, rule, with_entropy);
  const float* data = x.const_data_ptr<float>();
  std::vector<SampledToken> out(R);
  at::parallel_for(0, R, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const auto scratch = rule.filters(V) ? thread_filter_scratch(V) : kernels::FilterScratch{};
      out[r] = kernels::score_row(data + r * V, V, rule, tokens[r], scratch, with_entropy);
    }
  });
  return out;
}

void score_pairs(const at::Tensor& logits, const PairQuery& query, const at::Tensor& logprobs,
                 const at::Tensor& unfiltered, const at::Tensor& entropy) {
  check_rule(query.rule);
  score_pairs_cuda.get(logits)(checked_logits(logits), query, logprobs, unfiltered, entropy);
}

void pairs_gradient(const at::Tensor& logits, const PairQuery& query, const at::Tensor& g,
                    const at::Tensor& g_unfiltered, const at::Tensor& d_logits) {
  check_rule(query.rule);
  pairs_gradient_cuda.get(logits)(checked_logits(logits), query, g, g_unfiltered, d_logits);
}

}  // namespace nemo_rl::ops
