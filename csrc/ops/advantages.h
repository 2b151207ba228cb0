// Advantage estimators on tensors. Formulas: kernels/{group_baseline,reinforce_plus_plus,gae,masked_reduce}.h.
// Rewards decide the dtype (float32 or float64) unless said otherwise; masks may have any dtype, with values 0 and 1.
#pragma once
#include <ATen/core/Tensor.h>

#include "kernels/gae.h"
#include "kernels/masked_reduce.h"
#include "kernels/reinforce_plus_plus.h"
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

using kernels::GaeConfig;
using kernels::KlEstimator;

/// [B] int64: the index of the first row of `prompts` [B, L] or [B] that equals row i.
at::Tensor group_ids_from_prompts(const at::Tensor& prompts);

struct GroupBaseline {
  at::Tensor baseline;  ///< [B]
  at::Tensor std;       ///< [B]
};
/// `valid_mask` and `std_rewards` may be undefined: all valid; rewards. Runs on the CPU; results on the rewards'
/// device.
GroupBaseline group_baseline(const at::Tensor& rewards, const at::Tensor& group_ids, const at::Tensor& valid_mask,
                             bool leave_one_out, const at::Tensor& std_rewards);

/// [B]: rewards - baseline, and over (std + 1e-6) where normalize and std > 0.
at::Tensor grpo_advantages(const at::Tensor& rewards, const at::Tensor& baseline, const at::Tensor& std,
                           bool normalize);

/// [B]: (sum_k weights_k advantages_k - mean) / std over the samples (unbiased; only the mean is taken off where std is
/// 0).
at::Tensor gdpo_advantages(const at::Tensor& components, const at::Tensor& weights);

// What belongs to tokens is [B, S]; with `offsets`, int64 [B + 1] on the CPU, it is [T], and row b is
// [offsets[b], offsets[b + 1]). A row's result has the same bits in both, where the padding is masked.

/// Per-token advantages; `degenerate` is set when too few tokens were valid to whiten (they are 0 then).
struct TokenAdvantages {
  at::Tensor advantages;  ///< [B, S] or [T]
  at::Tensor returns;     ///< the same, or undefined
  bool degenerate = false;
};

/// (advantage - kl_coef K) whitened over all valid tokens; 0 at masked positions. `logprobs` and `reference` may both
/// be undefined: no KL term.
TokenAdvantages reinforce_plus_plus(const at::Tensor& advantages, const at::Tensor& mask, const at::Tensor& logprobs,
                                    const at::Tensor& reference, double kl_coef, KlEstimator kl_type,
                                    const at::Tensor& offsets = {});

/// The reward on each token, whitened over the valid ones if `normalize`; masked positions get the same transform.
TokenAdvantages raw_reward(const at::Tensor& rewards, const at::Tensor& mask, bool normalize,
                           const at::Tensor& offsets = {});

/// GAE; `values` decides the dtype together with the rewards (the wider). Whitened over valid tokens if
/// `normalize`.
TokenAdvantages gae(const at::Tensor& rewards, const at::Tensor& values, const at::Tensor& mask,
                    const at::Tensor& logprobs, const at::Tensor& reference, const GaeConfig& config, bool normalize,
                    const at::Tensor& offsets = {});

/// In-place whitening of `values` (contiguous) over mask != 0; returns whether it was degenerate.
bool whiten_(at::Tensor& values, const at::Tensor& mask, kernels::WhitenRule rule, bool zero_masked,
             const at::Tensor& offsets = {});

template <class T>
using GaeLauncher = void(const kernels::GaeArgs<T>&, const GaeConfig&);
extern runtime::CudaSlot<GaeLauncher<float>> gae_cuda_f32;
extern runtime::CudaSlot<GaeLauncher<double>> gae_cuda_f64;
template <class T>
using TokenAdvantageLauncher = void(const kernels::TokenAdvantageArgs<T>&);
extern runtime::CudaSlot<TokenAdvantageLauncher<float>> token_advantages_cuda_f32;
extern runtime::CudaSlot<TokenAdvantageLauncher<double>> token_advantages_cuda_f64;
/// `rows` [B] Moments and `scale` [1] WhitenScale are workspace on the device.
template <class T>
using WhitenLauncher = void(const kernels::MaskedArgs<T>&, kernels::WhitenRule, bool zero_masked,
                            kernels::Moments* rows, kernels::WhitenScale* scale);
extern runtime::CudaSlot<WhitenLauncher<float>> whiten_cuda_f32;
extern runtime::CudaSlot<WhitenLauncher<double>> whiten_cuda_f64;

}  // namespace nemo_rl::ops
