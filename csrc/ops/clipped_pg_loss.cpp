#include "ops/clipped_pg_loss.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cmath>

#include "ops/checks.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

using kernels::ClippedPGArgs;
using kernels::kNumPGMetrics;
using kernels::kPGRowSize;

runtime::CudaSlot<ClippedPGLauncher<float>> clipped_pg_loss_cuda_f32("clipped_pg_loss");
runtime::CudaSlot<ClippedPGLauncher<double>> clipped_pg_loss_cuda_f64("clipped_pg_loss");

const std::vector<std::string>& clipped_pg_metric_names() {
  static const std::vector<std::string> names = {"loss",
                                                 "probs_ratio",
                                                 "probs_ratio_clamped",
                                                 "probs_ratio_min",
                                                 "probs_ratio_max",
                                                 "probs_ratio_clamped_min",
                                                 "probs_ratio_clamped_max",
                                                 "kl_penalty",
                                                 "token_mult_prob_error",
                                                 "gen_kl_error",
                                                 "policy_kl_error",
                                                 "js_divergence_error",
                                                 "sampling_importance_ratio",
                                                 "num_valid_samples",
                                                 "approx_entropy",
                                                 "is_oob_ratio",
                                                 "positive_nll_loss",
                                                 "nonfinite_sample",
                                                 "nonfinite_token",
                                                 "token_mult_prob_error_sum"};
  NRL_CHECK(names.size() == kNumPGMetrics, "one name a metric");
  return names;
}

RatioMode parse_ratio_mode(const std::string& name) {
  static const std::vector<std::string> names = {"ppo",     "reinforce", "cispo", "on_policy", "sapo",  "dppo_tv",
                                                 "dppo_kl", "dro",       "gmpo",  "vespo",     "kl_cov"};
  const auto found = std::find(names.begin(), names.end(), name);
  NRL_CHECK_ARG(found != names.end(), "ratio mode '", name, "' is unknown; expected one of ", c10::Join(", ", names));
  return static_cast<RatioMode>(found - names.begin());
}

ImportanceSampling parse_importance_sampling(const std::string& name) {
  if (name == "none") return ImportanceSampling::none;
  if (name == "full") return ImportanceSampling::full;
  if (name == "tis") return ImportanceSampling::tis;
  if (name == "icepop") return ImportanceSampling::icepop;
  if (name == "seq-mask-tis") return ImportanceSampling::seq_mask_tis;
  NRL_CHECK_ARG(false, "loss_fn.truncated_importance_sampling_type '", name,
                "' is unknown; expected tis, icepop or seq-mask-tis");
}

ImportanceLevel parse_importance_level(const std::string& name) {
  if (name == "token") return ImportanceLevel::token;
  if (name == "sequence") return ImportanceLevel::sequence;
  if (name == "geometric") return ImportanceLevel::geometric;
  NRL_CHECK_ARG(false, "importance level '", name, "' is unknown; expected token, sequence or geometric");
}

KlEstimator parse_kl_estimator(const std::string& name) {
  if (name == "k1") return KlEstimator::k1;
  if (name == "k2") return KlEstimator::k2;
  if (name == "k3") return KlEstimator::k3;
  NRL_CHECK_ARG(false, "loss_fn.reference_policy_kl_type is '", name, "'; expected k1, k2 or k3");
}

void check_config(const ClippedPGConfig& c) {
  NRL_CHECK_ARG(!c.dual_clip || c.ratio_clip_c > 1, "loss_fn.ratio_clip_c is ", c.ratio_clip_c,
                "; expected more than 1, or null");
  NRL_CHECK_ARG(!(c.sequence_level_ratios && c.token_level_loss),
                "loss_fn.sequence_level_importance_ratios needs loss_fn.token_level_loss: false");
  NRL_CHECK_ARG(c.ratio_mode != RatioMode::cispo || (c.token_level_loss && !c.dual_clip && !c.sequence_level_ratios),
                "loss_fn.use_cispo needs token_level_loss: true, ratio_clip_c: null and no sequence-level ratios");
  NRL_CHECK_ARG(c.fixed_length >= 0 && !(c.fixed_length > 0 && c.token_level_loss), "loss_fn.loss_scale_factor is ",
                c.fixed_length, "; expected a positive number and no token-level loss");
  NRL_CHECK_ARG(c.ratio_mode != RatioMode::gmpo || c.sequence_level_ratios,
                "the ratio mode gmpo is one ratio a sequence: it needs sequence_level_ratios");
  NRL_CHECK_ARG(c.ratio_mode != RatioMode::vespo ||
                    (!c.sequence_level_ratios && c.importance_sampling <= ImportanceSampling::full),
                "loss_fn.name vespo weighs whole sequences itself: it takes no sequence_level_importance_ratios and no "
                "truncated_importance_sampling_type");
  NRL_CHECK_ARG(c.sapo_temperature_pos > 0 && c.sapo_temperature_neg > 0, "loss_fn.sapo_temperature_pos and _neg are ",
                c.sapo_temperature_pos, " and ", c.sapo_temperature_neg, "; expected more than 0");
  const bool bounded = c.importance_sampling == ImportanceSampling::tis ||
                       c.importance_sampling == ImportanceSampling::icepop ||
                       c.importance_sampling == ImportanceSampling::seq_mask_tis;
  NRL_CHECK_ARG(!bounded || (c.importance_max > 0 && c.importance_min <= c.importance_max),
                "loss_fn.truncated_importance_sampling_ratio is ", c.importance_max, " with ..._ratio_min ",
                c.importance_min, "; expected a positive upper bound not below the lower one");
  NRL_CHECK_ARG(!(c.importance_sampling == ImportanceSampling::seq_mask_tis && row_importance(c)),
                "loss_fn.truncated_importance_sampling_type seq-mask-tis needs a weight for each token");
  NRL_CHECK_ARG(
      !(c.importance_level != ImportanceLevel::token && (c.sequence_level_ratios || c.ratio_mode == RatioMode::vespo)),
      "an importance weight for each sequence does not go with sequence_level_importance_ratios and vespo, "
      "which have their own");
}

namespace {

/// The converted tensors, kept alive while the kernel reads them.
struct Prepared {
  at::Tensor curr, advantages, prev, generation, reference, unfiltered, token_mask, penalty, sample_mask, rewards,
      counts;
};

at::Tensor count_or(const at::Tensor& given, const at::Tensor& own, const at::Tensor& like, const char* name) {
  if (!given.defined()) return own.to(at::kDouble);
  NRL_CHECK_ARG(given.numel() == 1, name, " has shape ", given.sizes(), "; expected one number");
  return given.detach().reshape({}).to(like.device(), at::kDouble);
}

at::Tensor loss_counts(const ClippedPGInputs& in, const Prepared& p, const ClippedPGConfig& c) {
  at::Tensor row_tokens, own_tokens, own_positive = at::zeros({}, p.curr.options().dtype(at::kDouble));
  const bool needs_positive =
      c.positive_nll_weight > 0 && in.rewards.defined() && !in.global_valid_positive_toks.defined();
  if (!in.global_valid_toks.defined() || needs_positive) {
    // a row's tokens are a whole number unless the mask is fractional: its own type counts them exactly
    row_tokens = p.token_mask.slice(1, 1).sum(1).to(at::kDouble) * p.sample_mask.to(at::kDouble);
    own_tokens = row_tokens.sum();
    if (needs_positive) own_positive = (row_tokens * (p.rewards > 0).to(at::kDouble)).sum();
  }
  return at::stack({count_or(in.global_valid_toks, own_tokens, p.curr, "global_valid_toks"),
                    count_or(in.global_valid_seqs, p.sample_mask.sum(), p.curr, "global_valid_seqs"),
                    count_or(in.global_valid_positive_toks, own_positive, p.curr, "global_valid_positive_toks")})
      .contiguous();
}

Prepared prepare(const ClippedPGInputs& in, const ClippedPGConfig& config) {
  check_real(in.curr_logprobs, "curr_logprobs");
  NRL_CHECK_ARG(in.curr_logprobs.dim() == 2, "curr_logprobs has shape ", in.curr_logprobs.sizes(),
                "; expected [B, S-1]");
  const std::int64_t B = in.curr_logprobs.size(0), S = in.curr_logprobs.size(1) + 1;
  Prepared p;
  p.curr = as_matrix(in.curr_logprobs, in.curr_logprobs, B, S - 1, "curr_logprobs");
  p.advantages = as_matrix(in.advantages, p.curr, B, S, "advantages");
  p.generation = as_matrix(in.generation_logprobs, p.curr, B, S, "generation_logprobs");
  p.token_mask = as_matrix(in.token_mask, p.curr, B, S, "token_mask");
  p.sample_mask = as_vector(in.sample_mask, p.curr, B, "sample_mask");
  if (config.ratio_mode != RatioMode::on_policy) p.prev = as_matrix(in.prev_logprobs, p.curr, B, S, "prev_logprobs");
  if (config.ratio_mode == RatioMode::kl_cov) p.penalty = as_matrix(in.kl_cov_penalty, p.curr, B, S, "kl_cov_penalty");
  if (config.kl_penalty != 0) {
    p.reference = as_matrix(in.reference_policy_logprobs, p.curr, B, S, "reference_policy_logprobs");
    if (in.curr_logprobs_unfiltered.defined())
      p.unfiltered = as_matrix(in.curr_logprobs_unfiltered, p.curr, B, S - 1, "curr_logprobs_unfiltered");
  }
  if (in.rewards.defined() && config.positive_nll_weight > 0) p.rewards = as_vector(in.rewards, p.curr, B, "rewards");
  p.counts = loss_counts(in, p, config);
  return p;
}

template <class T>
kernels::MatrixView<T> view(const at::Tensor& t, std::int64_t skip) {
  if (!t.defined()) return {};
  return {t.const_data_ptr<T>() + skip, t.stride(0)};
}

template <class T>
ClippedPGArgs<T> kernel_args(const Prepared& p, ClippedPGResult& out) {
  ClippedPGArgs<T> a;
  a.num_rows = p.curr.size(0);
  a.num_tokens = p.curr.size(1);
  a.curr = view<T>(p.curr, 0);
  a.unfiltered = view<T>(p.unfiltered, 0);
  a.advantages = view<T>(p.advantages, 1);
  a.prev = view<T>(p.prev, 1);
  a.generation = view<T>(p.generation, 1);
  a.reference = view<T>(p.reference, 1);
  a.token_mask = view<T>(p.token_mask, 1);
  a.penalty = view<T>(p.penalty, 1);
  a.sample_mask = p.sample_mask.const_data_ptr<T>();
  a.rewards = p.rewards.defined() ? p.rewards.const_data_ptr<T>() : nullptr;
  a.grad = out.grad_logprobs.mutable_data_ptr<T>();
  a.grad_unfiltered = out.grad_unfiltered.defined() ? out.grad_unfiltered.mutable_data_ptr<T>() : nullptr;
  a.counts = p.counts.const_data_ptr<double>();
  return a;
}

template <class T, class Kernel>
void run_cpu(const Prepared& p, const ClippedPGConfig& config, Kernel* kernel, double* rows, ClippedPGResult& out) {
  const ClippedPGArgs<T> args = kernel_args<T>(p, out);
  at::parallel_for(0, args.num_rows, row_grain(args.num_tokens),
                   [&](std::int64_t begin, std::int64_t end) { kernel(args, config, begin, end, rows); });
  double merged[kPGRowSize];
  for (int i = 0; i < kPGRowSize; ++i) {
    const kernels::RowMerge how = kernels::clipped_pg_merge(i);
    merged[i] = kernels::merge_identity(how);
    for (std::int64_t b = 0; b < args.num_rows; ++b)
      merged[i] = kernels::merge_rows(how, merged[i], rows[b * kPGRowSize + i]);
  }
  kernels::clipped_pg_finalize(merged, args.num_tokens, config, kernels::loss_weights<T>(args.counts),
                               out.metrics.mutable_data_ptr<double>());
}

}  // namespace

ClippedPGResult clipped_pg_loss(const ClippedPGInputs& inputs, const ClippedPGConfig& config) {
  check_config(config);
  const Prepared p = prepare(inputs, config);
  const auto doubles = p.curr.options().dtype(at::kDouble);
  ClippedPGResult out;
  out.grad_logprobs = at::empty(p.curr.sizes(), p.curr.options());
  if (p.unfiltered.defined()) out.grad_unfiltered = at::empty(p.curr.sizes(), p.curr.options());
  out.metrics = at::empty({kNumPGMetrics}, doubles);
  const at::Tensor rows = at::empty({p.curr.size(0), kPGRowSize}, doubles);
  double* row_data = rows.mutable_data_ptr<double>();
  const bool f32 = p.curr.scalar_type() == at::kFloat;
  if (p.curr.is_cuda()) {
    double* metrics = out.metrics.mutable_data_ptr<double>();
    if (f32) clipped_pg_loss_cuda_f32.get(p.curr)(kernel_args<float>(p, out), config, row_data, metrics);
    else clipped_pg_loss_cuda_f64.get(p.curr)(kernel_args<double>(p, out), config, row_data, metrics);
  } else if (f32) {
    run_cpu<float>(p, config, kernels::clipped_pg_loss_f32, row_data, out);
  } else {
    run_cpu<double>(p, config, kernels::clipped_pg_loss_f64, row_data, out);
  }
  out.loss = out.metrics.select(0, kernels::kLoss).to(p.curr.scalar_type());
  return out;
}

}  // namespace nemo_rl::ops
