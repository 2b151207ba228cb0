// Sampling and scoring rows of logits on CUDA: arguments to the device, chosen tokens back.
#include <limits>

#include "kernels/cuda/sampling_launchers.h"
#include "ops/kernel_types.h"
#include "ops/sampling.h"
#include "runtime/cuda_launch.h"

namespace nemo_rl::ops {
namespace {

std::vector<SampledToken> sample_rows_on_cuda(const at::Tensor& logits, const std::vector<RowDraw>& draws,
                                              bool with_entropy) {
  const runtime::CudaLaunch launch(logits, "sample_rows");
  std::vector<kernels::CudaDraw> wanted;
  wanted.reserve(draws.size());
  for (const RowDraw& d : draws) wanted.push_back({d.logits_row, d.rule, d.uniform});
  const auto uploaded = runtime::to_device(wanted, logits);
  const auto count = static_cast<std::int64_t>(draws.size());
  const auto sampled = launch.scratch(count * static_cast<std::int64_t>(sizeof(SampledToken)), at::kByte);
  launch.check(kernels::sample_rows_launch(
      ptr<float>(logits), logits.size(1), static_cast<const kernels::CudaDraw*>(uploaded.const_data_ptr()), count,
      with_entropy, static_cast<SampledToken*>(sampled.data_ptr()), launch.stream));
  const auto host = sampled.cpu();
  const auto* first = static_cast<const SampledToken*>(host.const_data_ptr());
  return {first, first + count};
}

kernels::PairRows pair_rows(const at::Tensor& logits, const PairQuery& query) {
  NRL_CHECK_ARG(
      query.first.device() == logits.device() && query.targets.device() == logits.device() &&
          query.first.scalar_type() == at::kLong && query.targets.scalar_type() == at::kLong &&
          query.first.is_contiguous() && query.targets.is_contiguous() && query.first.numel() == logits.size(0) + 1,
      "pairs of ", logits.sizes(), " logits: expected first [R + 1] and targets, int64 on ", logits.device().str());
  NRL_CHECK_ARG(!query.rule.greedy, "pairs of logits have no greedy rule");
  return {ptr<float>(logits),
          logits.size(0),
          logits.size(1),
          query.rule,
          ptr<std::int64_t>(query.first),
          ptr<std::int64_t>(query.targets)};
}

void check_values(const at::Tensor& values, const at::Tensor& logits, const char* name) {
  NRL_CHECK_ARG(!values.defined() || (values.scalar_type() == at::kFloat && values.is_contiguous() &&
                                      values.device() == logits.device()),
                name, " must be contiguous float32 on ", logits.device().str());
}

float* or_null(const at::Tensor& t) { return t.defined() ? mutable_ptr<float>(t) : nullptr; }

void score_pairs_on_cuda(const at::Tensor& logits, const PairQuery& query, const at::Tensor& logprobs,
                         const at::Tensor& unfiltered, const at::Tensor& entropy) {
  const runtime::CudaLaunch launch(logits, "score_pairs");
  check_values(logprobs, logits, "logprobs");
  check_values(unfiltered, logits, "unfiltered");
  check_values(entropy, logits, "entropy");
  launch.check(kernels::score_pairs_launch(pair_rows(logits, query), mutable_ptr<float>(logprobs), or_null(unfiltered),
                                           or_null(entropy), launch.stream));
}

void pairs_gradient_on_cuda(const at::Tensor& logits, const PairQuery& query, const at::Tensor& g,
                            const at::Tensor& g_unfiltered, const at::Tensor& d_logits) {
  const runtime::CudaLaunch launch(logits, "pairs_gradient");
  check_values(g, logits, "g");
  check_values(g_unfiltered, logits, "g_unfiltered");
  NRL_CHECK_ARG(d_logits.sizes() == logits.sizes() && d_logits.is_contiguous() && d_logits.device() == logits.device(),
                "pairs_gradient: d_logits must be contiguous ", logits.sizes());
  const auto args = pair_rows(logits, query);
  runtime::dispatch_cuda(d_logits.scalar_type(), launch.op, [&](auto tag) {
    using O = decltype(tag);
    launch.check(kernels::pairs_gradient_launch(args, ptr<float>(g),
                                                g_unfiltered.defined() ? ptr<float>(g_unfiltered) : nullptr,
                                                mutable_ptr<O>(d_logits), launch.stream));
  });
}

/// One pair a row. Greedy rows are scored at temperature 1 without a filter.
std::vector<SampledToken> score_rows_on_cuda(const at::Tensor& logits, const at::Tensor& token_ids,
                                             const SamplingRule& rule, bool with_entropy) {
  const std::int64_t R = logits.size(0);
  const PairQuery query{at::arange(R + 1, logits.options().dtype(at::kLong)), token_ids.to(logits.device()),
                        rule.greedy ? SamplingRule{} : rule};
  const auto logprobs = at::empty({R}, logits.options()),
             entropy = with_entropy ? at::empty({R}, logits.options()) : at::Tensor();
  score_pairs_on_cuda(logits, query, logprobs, {}, entropy);
  const auto values = logprobs.cpu(), entropies = with_entropy ? entropy.cpu() : at::zeros({R});
  std::vector<SampledToken> out(static_cast<std::size_t>(R));
  for (std::int64_t r = 0; r < R; ++r) {
    const float logprob = ptr<float>(values)[r];
    const bool fit = logprob == logprob;
    out[static_cast<std::size_t>(r)] = {fit ? ptr<std::int64_t>(token_ids)[r] : -1,
                                        fit ? logprob : -std::numeric_limits<float>::infinity(),
                                        fit ? ptr<float>(entropies)[r] : 0.0f};
  }
  return out;
}

const bool registered = [] {
  sample_rows_cuda.set(sample_rows_on_cuda);
  score_rows_cuda.set(score_rows_on_cuda);
  score_pairs_cuda.set(score_pairs_on_cuda);
  pairs_gradient_cuda.set(pairs_gradient_on_cuda);
  return true;
}();

}  // namespace
}  // namespace nemo_rl::ops
