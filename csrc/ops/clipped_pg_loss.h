// The clipped policy-gradient loss on tensors: check, allocate, launch. Formulas: kernels/clipped_pg_loss.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "kernels/clipped_pg_loss.h"
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

using kernels::ClippedPGConfig;
using kernels::ImportanceLevel;
using kernels::ImportanceSampling;
using kernels::KlEstimator;
using kernels::RatioMode;

/// B sequences of S tokens. Tensors of the data set are [B, S] and unshifted (column t belongs to token t); log-probs
/// of the trainer are [B, S - 1] (column t is the log-prob of token t + 1). Undefined where "optional".
struct ClippedPGInputs {
  at::Tensor curr_logprobs;               ///< [B, S-1] float32 or float64: decides dtype and device
  at::Tensor advantages;                  ///< [B, S]
  at::Tensor prev_logprobs;               ///< [B, S]; not read with RatioMode::on_policy
  at::Tensor generation_logprobs;         ///< [B, S]
  at::Tensor reference_policy_logprobs;   ///< [B, S]; read only if kl_penalty != 0
  at::Tensor token_mask;                  ///< [B, S]
  at::Tensor sample_mask;                 ///< [B]
  at::Tensor kl_cov_penalty;              ///< [B, S]; read with RatioMode::kl_cov
  at::Tensor curr_logprobs_unfiltered;    ///< [B, S-1], optional: what the KL term uses under top-k/top-p
  at::Tensor rewards;                     ///< [B], optional: for the positive-example NLL
  at::Tensor global_valid_toks;           ///< scalar; undefined: this batch's own count
  at::Tensor global_valid_seqs;           ///< scalar; undefined: this batch's own count
  at::Tensor global_valid_positive_toks;  ///< scalar; undefined: this batch's own count
};

struct ClippedPGResult {
  at::Tensor loss;             ///< scalar of curr_logprobs' dtype
  at::Tensor grad_logprobs;    ///< [B, S-1], d loss / d curr_logprobs
  at::Tensor grad_unfiltered;  ///< [B, S-1] or undefined, d loss / d curr_logprobs_unfiltered
  at::Tensor metrics;          ///< float64 [kNumPGMetrics]; names from clipped_pg_metric_names
};

ClippedPGResult clipped_pg_loss(const ClippedPGInputs& inputs, const ClippedPGConfig& config);

/// The names of ClippedPGResult::metrics in order; the last two give the first non-finite term (-1 if there is none).
const std::vector<std::string>& clipped_pg_metric_names();

/// ValueError for contradictions (ratio_clip_c <= 1, bounds the wrong way round, ...).
void check_config(const ClippedPGConfig& config);

RatioMode parse_ratio_mode(const std::string& name);
ImportanceSampling parse_importance_sampling(const std::string& name);
ImportanceLevel parse_importance_level(const std::string& name);
KlEstimator parse_kl_estimator(const std::string& name);

template <class T>
using ClippedPGLauncher = void(const kernels::ClippedPGArgs<T>&, const ClippedPGConfig&, double* rows, double* metrics);
extern runtime::CudaSlot<ClippedPGLauncher<float>> clipped_pg_loss_cuda_f32;
extern runtime::CudaSlot<ClippedPGLauncher<double>> clipped_pg_loss_cuda_f64;

}  // namespace nemo_rl::ops
