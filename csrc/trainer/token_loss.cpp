#include "trainer/token_loss.h"

#include <cstring>

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::trainer {
namespace {

/// Every token a sequence of its own: elements `index` of t as column 1 of [n, 2], column 0 never read.
at::Tensor token_rows(const at::Tensor& t, const at::Tensor& index) {
  if (!t.defined()) return {};
  const auto picked = t.reshape({-1}).index_select(0, index).to(at::kFloat);
  return at::stack({picked, picked}, 1);
}

at::Tensor sample_rows(const at::Tensor& t, const at::Tensor& rows) {
  return t.defined() ? t.index_select(0, rows).to(at::kFloat) : at::Tensor();
}

at::Tensor index_of(const std::vector<std::int64_t>& values, std::int64_t begin, std::int64_t end) {
  const auto index = at::empty({end - begin}, at::kLong);
  std::memcpy(index.data_ptr(), values.data() + begin, static_cast<std::size_t>(end - begin) * sizeof(std::int64_t));
  return index;
}

}  // namespace

bool TokenLoss::separable(const ops::ClippedPGConfig& config) {
  return (config.token_level_loss || (config.fixed_length > 0 && !config.sequence_level_ratios)) &&
         config.ratio_mode != kernels::RatioMode::vespo && config.importance_level == kernels::ImportanceLevel::token &&
         config.importance_sampling != kernels::ImportanceSampling::seq_mask_tis;
}

model::PairLoss TokenLoss::at(const std::vector<std::int64_t>& places, const std::vector<std::int64_t>& samples) const {
  NRL_CHECK(separable(config), "a loss of whole sequences has no gradient token by token");
  NRL_CHECK(inputs.global_valid_toks.defined() && inputs.global_valid_seqs.defined() &&
                (inputs.global_valid_positive_toks.defined() || !inputs.rewards.defined()),
            "a loss asked token by token needs the global counts");
  return [this, &places, &samples](std::int64_t begin, std::int64_t end, const float* logprobs, float* d_logprobs) {
    if (begin == end) return;
    const std::int64_t n = end - begin;
    const auto index = index_of(places, begin, end), rows = index_of(samples, begin, end);
    ops::ClippedPGInputs tokens = inputs;
    tokens.curr_logprobs = at::from_blob(const_cast<float*>(logprobs), {n, 1}, at::kFloat);
    tokens.advantages = token_rows(inputs.advantages, index);
    tokens.prev_logprobs = inputs.prev_logprobs.defined() ? token_rows(inputs.prev_logprobs, index)
                                                          : at::cat({tokens.curr_logprobs, tokens.curr_logprobs}, 1);
    tokens.generation_logprobs = token_rows(inputs.generation_logprobs, index);
    tokens.reference_policy_logprobs = token_rows(inputs.reference_policy_logprobs, index);
    tokens.token_mask = token_rows(inputs.token_mask, index);
    tokens.kl_cov_penalty = token_rows(inputs.kl_cov_penalty, index);
    tokens.sample_mask = sample_rows(inputs.sample_mask, rows);
    tokens.rewards = sample_rows(inputs.rewards, rows);
    const auto result = ops::clipped_pg_loss(tokens, config);
    std::memcpy(d_logprobs, result.grad_logprobs.const_data_ptr<float>(), static_cast<std::size_t>(n) * sizeof(float));
  };
}

}  // namespace nemo_rl::trainer
