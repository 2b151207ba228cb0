// C functions by which the tests call the CUDA launchers of losses and estimators, in float64; see
// entry_points_model.cpp.
#include <cuda_runtime_api.h>

#include "kernels/cuda/launchers.h"

using namespace nemo_rl::kernels;
using Int = std::int64_t;

extern "C" {

Int gae(Int rows, Int tokens, double* rewards, double* values, double* mask, double* logprobs, double* reference,
        double* advantages, double* returns, double gamma, double lambda, double lambda_value, Int decoupled,
        double alpha, double kl_coef) {
  GaeArgs<double> args{
      rows,       tokens, rewards, {values, tokens}, {mask, tokens}, {logprobs, tokens}, {reference, tokens},
      advantages, returns};
  return gae_launch(args, GaeConfig{gamma, lambda, lambda_value, decoupled != 0, alpha, kl_coef}, nullptr);
}

Int whiten(Int rows, Int tokens, double* values, double* mask, Int rule, Int zero_masked) {
  std::vector<Moments> moments(rows);
  WhitenScale scale;
  const MaskedArgs<double> args{rows, tokens, values, {mask, tokens}};
  return whiten_launch(args, static_cast<WhitenRule>(rule), zero_masked != 0, moments.data(), &scale, nullptr);
}

Int token_advantages(Int rows, Int tokens, double* advantages, double* mask, double* logprobs, double* reference,
                     double kl_coef, double* out) {
  TokenAdvantageArgs<double> args{
      rows, tokens, advantages, {mask, tokens}, {logprobs, tokens}, {reference, tokens}, kl_coef, KlEstimator::k3, out};
  return token_advantages_launch(args, nullptr);
}

/// metrics [kNumValueMetrics]
Int value_loss(Int rows, Int tokens, double* values, double* returns, double* old_values, double* token_mask,
               double* sample_mask, double* valid_tokens, double cliprange, double* grad, double* metrics) {
  std::vector<double> sums(rows * kValueRowSize);
  const ValueLossArgs<double> args{rows,
                                   tokens,
                                   {values, tokens},
                                   {returns, tokens},
                                   {old_values, tokens},
                                   {token_mask, tokens},
                                   sample_mask,
                                   valid_tokens,
                                   grad};
  return value_loss_launch(args, ValueLossConfig{1.0, cliprange}, sums.data(), metrics, nullptr);
}

/// The loss of a RatioMode with a KL term; metrics [kNumPGMetrics], counts [kNumLossCounts].
Int clipped_pg_loss(Int rows, Int tokens, double* curr, double* advantages, double* prev, double* generation,
                    double* reference, double* token_mask, double* sample_mask, double* counts, Int mode,
                    Int sequence_level, double kl_penalty, double* grad, double* metrics) {
  ClippedPGConfig config;
  config.ratio_mode = static_cast<RatioMode>(mode);
  config.token_level_loss = sequence_level == 0;
  config.sequence_level_ratios = sequence_level != 0;
  config.kl_penalty = kl_penalty;
  ClippedPGArgs<double> args;
  args.num_rows = rows, args.num_tokens = tokens;
  args.curr = {curr, tokens}, args.advantages = {advantages, tokens}, args.prev = {prev, tokens};
  args.generation = {generation, tokens}, args.reference = {reference, tokens}, args.token_mask = {token_mask, tokens};
  args.sample_mask = sample_mask, args.counts = counts, args.grad = grad;
  std::vector<double> sums(rows * kPGRowSize);
  return clipped_pg_loss_launch(args, config, sums.data(), metrics, nullptr);
}

}  // extern "C"
