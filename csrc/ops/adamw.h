// AdamW on flat buffers, and the gradient norm.
#pragma once
#include <optional>

#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

struct AdamWSettings {
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

/// One step of torch.optim.AdamW on flat buffers [n]; `step` counts from 1; `grad_scale` multiplies the gradients
/// first; `compute` (bfloat16) receives the rounded weights.
void adamw_step(const at::Tensor& weights, const at::Tensor& grads, const at::Tensor& exp_avg,
                const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& compute, const AdamWSettings& settings,
                std::int64_t step, double grad_scale);

/// Elements of a block: a gradient norm is summed over blocks in order, so a shard begins at a multiple of it.
constexpr std::int64_t kFlatBlock = 16384;

/// L2 norm of x [n]: squares summed in double over blocks of fixed size, in order.
double l2_norm(const at::Tensor& x);
/// The sum of squares of each block of x [n] on the CPU: float64 [blocks].
at::Tensor block_squares(const at::Tensor& x);
/// The norm from the sums of all blocks.
double norm_of_blocks(const at::Tensor& squares);

/// compute = weights rounded to bfloat16.
void round_weights(const at::Tensor& weights, const at::Tensor& compute);

using AdamWLauncher = void(const at::Tensor& weights, const at::Tensor& grads, const at::Tensor& exp_avg,
                           const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& compute,
                           const AdamWSettings& settings, std::int64_t step, double grad_scale);
extern runtime::CudaSlot<AdamWLauncher> adamw_step_cuda;
extern runtime::CudaSlot<double(const at::Tensor& x)> l2_norm_cuda;

}  // namespace nemo_rl::ops
