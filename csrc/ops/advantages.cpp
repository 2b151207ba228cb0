#include "ops/advantages.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include <algorithm>

#include "kernels/group_baseline.h"
#include "ops/checks.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

runtime::CudaSlot<GaeLauncher<float>> gae_cuda_f32("gae");
runtime::CudaSlot<GaeLauncher<double>> gae_cuda_f64("gae");
runtime::CudaSlot<TokenAdvantageLauncher<float>> token_advantages_cuda_f32("reinforce_plus_plus");
runtime::CudaSlot<TokenAdvantageLauncher<double>> token_advantages_cuda_f64("reinforce_plus_plus");
runtime::CudaSlot<WhitenLauncher<float>> whiten_cuda_f32("whiten");
runtime::CudaSlot<WhitenLauncher<double>> whiten_cuda_f64("whiten");

at::Tensor group_ids_from_prompts(const at::Tensor& prompts) {
  NRL_CHECK_ARG(prompts.dim() >= 1, "prompts has no batch dimension; expected [B, L]");
  const at::Tensor rows = prompts.detach().to(at::kCPU).contiguous();
  at::Tensor ids = at::empty({rows.size(0)}, at::kLong);
  const std::int64_t bytes = rows.size(0) == 0 ? 0 : static_cast<std::int64_t>(rows.nbytes()) / rows.size(0);
  kernels::first_equal_row(static_cast<const unsigned char*>(rows.const_data_ptr()), rows.size(0), bytes,
                           ids.mutable_data_ptr<std::int64_t>());
  return ids;
}

GroupBaseline group_baseline(const at::Tensor& rewards, const at::Tensor& group_ids, const at::Tensor& valid_mask,
                             bool leave_one_out, const at::Tensor& std_rewards) {
  NRL_CHECK_ARG(rewards.defined() && rewards.dim() == 1, "rewards has shape ", rewards.sizes(), "; expected [B]");
  const std::int64_t B = rewards.size(0);
  const at::Tensor like = at::empty({0}, at::kDouble);
  const auto doubles = [&](const at::Tensor& t, const char* name) { return as_vector(t.to(at::kCPU), like, B, name); };
  const at::Tensor r = doubles(rewards, "rewards");
  const at::Tensor q = std_rewards.defined() ? doubles(std_rewards, "std_rewards") : at::Tensor();
  const at::Tensor valid = valid_mask.defined() ? doubles(valid_mask, "valid_mask") : at::ones({B}, at::kDouble);
  NRL_CHECK_ARG(group_ids.numel() == B, "group ids have shape ", group_ids.sizes(), "; expected [", B, "]");
  const at::Tensor ids = group_ids.to(at::kCPU, at::kLong).reshape({B}).contiguous();
  const at::Tensor baseline = at::empty({B}, at::kDouble), std = at::empty({B}, at::kDouble);
  kernels::GroupBaselineArgs a;
  a.num_samples = B;
  a.rewards = r.const_data_ptr<double>();
  a.std_rewards = q.defined() ? q.const_data_ptr<double>() : nullptr;
  a.valid = valid.const_data_ptr<double>();
  a.group = ids.const_data_ptr<std::int64_t>();
  a.leave_one_out = leave_one_out;
  a.baseline = baseline.mutable_data_ptr<double>();
  a.std = std.mutable_data_ptr<double>();
  kernels::group_baseline(a);
  const auto dtype = rewards.is_floating_point() ? rewards.scalar_type() : at::kFloat;
  return {baseline.to(rewards.device(), dtype), std.to(rewards.device(), dtype)};
}

at::Tensor grpo_advantages(const at::Tensor& rewards, const at::Tensor& baseline, const at::Tensor& std,
                           bool normalize) {
  const at::Tensor centred = rewards.to(at::kDouble) - baseline.to(at::kDouble);
  const at::Tensor spread = std.to(at::kDouble);
  const at::Tensor out = normalize ? at::where(spread > 0, centred / (spread + 1e-6), centred) : centred;
  return out.to(baseline.scalar_type());
}

at::Tensor gdpo_advantages(const at::Tensor& components, const at::Tensor& weights) {
  NRL_CHECK_ARG(components.dim() == 2 && weights.numel() == components.size(0), "components has shape ",
                components.sizes(), " and weights ", weights.sizes(), "; expected [K, B] and [K]");
  const at::Tensor sum =
      (components.to(at::kDouble) * weights.to(components.device(), at::kDouble).reshape({-1, 1})).sum(0);
  const at::Tensor centred = sum - sum.mean();
  if (sum.numel() < 2) return centred.to(components.scalar_type());
  const at::Tensor std = sum.std();
  const bool equal = sum.max().item<double>() == sum.min().item<double>();
  if (equal) return at::zeros_like(sum).to(components.scalar_type());
  return (std.item<double>() > 0 ? centred / std : centred).to(components.scalar_type());
}

namespace {

template <class T>
kernels::MatrixView<T> view(const at::Tensor& t) {
  if (!t.defined()) return {};
  return {t.const_data_ptr<T>(), t.stride(0)};
}

/// Calls f(T{}) with the tensor's type.
template <class F>
auto dispatch_real(const at::Tensor& t, F&& f) {
  return t.scalar_type() == at::kFloat ? f(float{}) : f(double{});
}

/// As many rows at a time as make a good piece of work.
template <class F>
void over_rows(std::int64_t rows, std::int64_t row_length, F&& f) {
  at::parallel_for(0, rows, row_grain(row_length), std::forward<F>(f));
}

/// Where the tokens of B rows lie: [B, S], or [T] with offsets.
struct Rows {
  std::int64_t count, width;  ///< width: S; about the mean length where there is no padding
  at::Tensor offsets;         ///< [B + 1] or undefined

  /// Of B rows; `mask` has the shape of all that belongs to tokens.
  Rows(std::int64_t B, const at::Tensor& mask, const at::Tensor& given) : count(B), width(0), offsets(given) {
    NRL_CHECK_ARG(mask.defined(), "mask is missing");
    if (!offsets.defined()) {
      NRL_CHECK_ARG(mask.dim() == 2, "mask has shape ", mask.sizes(), "; expected [B, S]");
      width = mask.size(1);
      return;
    }
    NRL_CHECK_ARG(mask.dim() == 1 && mask.is_cpu(), "mask has shape ", mask.sizes(),
                  "; with offsets, [T] on the CPU is expected");
    NRL_CHECK_ARG(
        offsets.is_cpu() && offsets.scalar_type() == at::kLong && offsets.is_contiguous() && offsets.numel() == B + 1,
        "offsets have shape ", offsets.sizes(), "; expected int64 [", B + 1, "] on the CPU");
    const auto* const at = offsets.const_data_ptr<std::int64_t>();
    NRL_CHECK_ARG(at[0] == 0 && at[B] == mask.numel() && std::is_sorted(at, at + B + 1),
                  "offsets must go up from 0 to ", mask.numel(), ", the number of tokens");
    width = B == 0 ? 0 : mask.numel() / B;
  }
  /// What belongs to tokens, in `like`'s type.
  at::Tensor of_tokens(const at::Tensor& t, const at::Tensor& like, const char* name) const {
    return offsets.defined() ? as_vector(t, like, offsets.const_data_ptr<std::int64_t>()[count], name)
                             : as_matrix(t, like, count, width, name);
  }
  at::Tensor empty(const at::TensorOptions& options) const {
    return offsets.defined() ? at::empty({offsets.const_data_ptr<std::int64_t>()[count]}, options)
                             : at::empty({count, width}, options);
  }
  template <class Args>
  void put(Args& args) const {
    args.num_rows = count;
    args.num_tokens = width;
    args.offsets = offsets.defined() ? offsets.const_data_ptr<std::int64_t>() : nullptr;
  }
};

/// KL needs both or neither of the log-probs; converted to `like`.
struct Logprobs {
  at::Tensor policy, reference;
};
Logprobs take_logprobs(const at::Tensor& logprobs, const at::Tensor& reference, const at::Tensor& like,
                       const Rows& rows) {
  NRL_CHECK_ARG(logprobs.defined() == reference.defined(),
                "the KL term needs the policy's and the reference's log-probs; one is missing");
  if (!logprobs.defined()) return {};
  return {rows.of_tokens(logprobs, like, "logprobs"), rows.of_tokens(reference, like, "reference logprobs")};
}

template <class T>
bool whiten_typed(at::Tensor& values, const at::Tensor& mask, const Rows& rows_of, kernels::WhitenRule rule,
                  bool zero_masked) {
  kernels::MaskedArgs<T> a;
  rows_of.put(a);
  a.values = values.mutable_data_ptr<T>();
  a.mask = view<T>(mask);
  constexpr std::int64_t kDoubles = sizeof(kernels::Moments) / sizeof(double);
  const at::Tensor work = at::empty({a.num_rows * kDoubles + 3}, values.options().dtype(at::kDouble));
  auto* rows = reinterpret_cast<kernels::Moments*>(work.mutable_data_ptr<double>());
  if (values.is_cuda()) {
    auto* scale = reinterpret_cast<kernels::WhitenScale*>(work.mutable_data_ptr<double>() + a.num_rows * kDoubles);
    if constexpr (std::is_same_v<T, float>) whiten_cuda_f32.get(values)(a, rule, zero_masked, rows, scale);
    else whiten_cuda_f64.get(values)(a, rule, zero_masked, rows, scale);
    return work.select(0, a.num_rows * kDoubles + 2).item().toDouble() != 0;
  }
  const auto moments = [&](std::int64_t begin, std::int64_t end) {
    if constexpr (std::is_same_v<T, float>) kernels::masked_moments_f32(a, begin, end, rows);
    else kernels::masked_moments_f64(a, begin, end, rows);
  };
  const auto whiten = [&](const kernels::WhitenScale& scale, std::int64_t begin, std::int64_t end) {
    if constexpr (std::is_same_v<T, float>) kernels::whiten_f32(a, scale, zero_masked, begin, end);
    else kernels::whiten_f64(a, scale, zero_masked, begin, end);
  };
  over_rows(a.num_rows, a.num_tokens, moments);
  kernels::Moments all;
  for (std::int64_t b = 0; b < a.num_rows; ++b) all = kernels::merge_moments(all, rows[b]);
  const kernels::WhitenScale scale = kernels::whiten_scale<T>(rule, all);
  over_rows(a.num_rows, a.num_tokens, [&](std::int64_t begin, std::int64_t end) { whiten(scale, begin, end); });
  return scale.degenerate != 0;
}

template <class T>
void fill_token_advantages(const at::Tensor& advantages, const at::Tensor& mask, const Logprobs& logprobs,
                           const Rows& rows, double kl_coef, KlEstimator kl_type, at::Tensor& out) {
  kernels::TokenAdvantageArgs<T> a;
  rows.put(a);
  a.advantages = advantages.const_data_ptr<T>();
  a.mask = view<T>(mask);
  a.logprobs = view<T>(logprobs.policy);
  a.reference = view<T>(logprobs.reference);
  a.kl_coef = kl_coef;
  a.kl_type = kl_type;
  a.out = out.mutable_data_ptr<T>();
  if constexpr (std::is_same_v<T, float>) {
    if (out.is_cuda()) return token_advantages_cuda_f32.get(out)(a);
    over_rows(a.num_rows, a.num_tokens,
              [&](std::int64_t begin, std::int64_t end) { kernels::token_advantages_f32(a, begin, end); });
  } else {
    if (out.is_cuda()) return token_advantages_cuda_f64.get(out)(a);
    over_rows(a.num_rows, a.num_tokens,
              [&](std::int64_t begin, std::int64_t end) { kernels::token_advantages_f64(a, begin, end); });
  }
}

TokenAdvantages token_advantages(const at::Tensor& per_sample, const at::Tensor& mask, const at::Tensor& logprobs,
                                 const at::Tensor& reference, double kl_coef, KlEstimator kl_type,
                                 const at::Tensor& offsets) {
  check_real(per_sample, "rewards");
  const at::Tensor sample = as_vector(per_sample, per_sample, per_sample.numel(), "rewards");
  const Rows rows(sample.size(0), mask, offsets);
  const at::Tensor m = rows.of_tokens(mask, sample, "mask");
  const Logprobs of_tokens = take_logprobs(logprobs, reference, sample, rows);
  TokenAdvantages out;
  out.advantages = rows.empty(sample.options());
  dispatch_real(sample, [&](auto zero) {
    fill_token_advantages<decltype(zero)>(sample, m, of_tokens, rows, kl_coef, kl_type, out.advantages);
  });
  return out;
}

template <class T>
void run_gae(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask, const Logprobs& logprobs,
             const Rows& rows, const GaeConfig& config, TokenAdvantages& out) {
  kernels::GaeArgs<T> a;
  rows.put(a);
  a.rewards = rewards.const_data_ptr<T>();
  a.values = view<T>(values);
  a.mask = view<T>(mask);
  a.logprobs = view<T>(logprobs.policy);
  a.reference = view<T>(logprobs.reference);
  a.advantages = out.advantages.mutable_data_ptr<T>();
  a.returns = out.returns.mutable_data_ptr<T>();
  if constexpr (std::is_same_v<T, float>) {
    if (values.is_cuda()) return gae_cuda_f32.get(values)(a, config);
    over_rows(a.num_rows, a.num_tokens,
              [&](std::int64_t begin, std::int64_t end) { kernels::gae_f32(a, config, begin, end); });
  } else {
    if (values.is_cuda()) return gae_cuda_f64.get(values)(a, config);
    over_rows(a.num_rows, a.num_tokens,
              [&](std::int64_t begin, std::int64_t end) { kernels::gae_f64(a, config, begin, end); });
  }
}

}  // namespace

bool whiten_(at::Tensor& values, const at::Tensor& mask, kernels::WhitenRule rule, bool zero_masked,
             const at::Tensor& offsets) {
  check_real(values, "values");
  NRL_CHECK_ARG(values.dim() == (offsets.defined() ? 1 : 2) && values.is_contiguous(), "values has shape ",
                values.sizes(), offsets.defined() ? "; with offsets, [T] is expected" : "; expected contiguous [B, S]");
  NRL_CHECK_ARG(mask.defined() && mask.sizes() == values.sizes(), "mask has shape ", mask.sizes(), "; expected ",
                values.sizes());
  const Rows rows(offsets.defined() ? offsets.numel() - 1 : values.size(0), mask, offsets);
  const at::Tensor m = rows.of_tokens(mask, values, "mask");
  return dispatch_real(values,
                       [&](auto zero) { return whiten_typed<decltype(zero)>(values, m, rows, rule, zero_masked); });
}

TokenAdvantages reinforce_plus_plus(const at::Tensor& advantages, const at::Tensor& mask, const at::Tensor& logprobs,
                                    const at::Tensor& reference, double kl_coef, KlEstimator kl_type,
                                    const at::Tensor& offsets) {
  TokenAdvantages out = token_advantages(advantages, mask, logprobs, reference, kl_coef, kl_type, offsets);
  out.degenerate = whiten_(out.advantages, mask, kernels::WhitenRule::biased_clamped, true, offsets);
  return out;
}

TokenAdvantages raw_reward(const at::Tensor& rewards, const at::Tensor& mask, bool normalize,
                           const at::Tensor& offsets) {
  TokenAdvantages out = token_advantages(rewards, mask, {}, {}, 0.0, KlEstimator::k3, offsets);
  if (normalize) out.degenerate = whiten_(out.advantages, mask, kernels::WhitenRule::biased_clamped, false, offsets);
  return out;
}

TokenAdvantages gae(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask,
                    const at::Tensor& logprobs, const at::Tensor& reference, const GaeConfig& config, bool normalize,
                    const at::Tensor& offsets) {
  check_real(values, "values");
  NRL_CHECK_ARG(offsets.defined() || values.dim() == 2, "values has shape ", values.sizes(), "; expected [B, S]");
  const std::int64_t B = offsets.defined() ? offsets.numel() - 1 : values.size(0);
  const bool wide = values.scalar_type() == at::kDouble || rewards.scalar_type() == at::kDouble;
  const at::Tensor v = values.detach().to(wide ? at::kDouble : at::kFloat);
  const at::Tensor reward_rows = as_vector(rewards, v, B, "rewards");
  NRL_CHECK_ARG(mask.sizes() == values.sizes(), "mask has shape ", mask.sizes(), "; expected ", values.sizes());
  const Rows rows(B, mask, offsets);
  const at::Tensor value_rows = rows.of_tokens(v, v, "values"), m = rows.of_tokens(mask, v, "mask");
  Logprobs of_tokens;
  if (config.kl_coef != 0) of_tokens = take_logprobs(logprobs, reference, v, rows);
  GaeConfig effective = config;
  if (!of_tokens.policy.defined()) effective.kl_coef = 0;
  TokenAdvantages out;
  out.advantages = rows.empty(v.options());
  out.returns = rows.empty(v.options());
  dispatch_real(
      v, [&](auto zero) { run_gae<decltype(zero)>(reward_rows, value_rows, m, of_tokens, rows, effective, out); });
  if (normalize) out.degenerate = whiten_(out.advantages, m, kernels::WhitenRule::unbiased_added, true, offsets);
  return out;
}

}  // namespace nemo_rl::ops
