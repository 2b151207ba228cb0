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

/// Flat buffers [n] of a shard of the weights; a moment is float32, bfloat16 or, like the other one,
/// uint8 (float64 for float64 weights).
struct AdamWBuffers {
  at::Tensor weights, grads, exp_avg, exp_avg_sq;
  std::optional<at::Tensor> compute;  ///< bfloat16: receives the rounded weights
  std::int64_t first = 0;             ///< place of the shard in the whole buffer, in elements
  /// int16: what the float32 weights have beyond `weights`, which are then bfloat16; without `compute`
  std::optional<at::Tensor> remainders = {};
};

/// One step of torch.optim.AdamW; `step` counts from 1; `grad_scale` multiplies the gradients first.
void adamw_step(const AdamWBuffers& buffers, const AdamWSettings& settings, std::int64_t step, double grad_scale);

/// Elements of a block: a gradient norm is summed over blocks in order, so a shard begins at a multiple of it.
constexpr std::int64_t kFlatBlock = 16384;

/// L2 norm of x [n]: squares summed in double over blocks of fixed size, in order.
double l2_norm(const at::Tensor& x);
/// The sum of squares of each block of x [n]: float64 [blocks] on the CPU.
at::Tensor block_squares(const at::Tensor& x);
/// The norm from the sums of all blocks.
double norm_of_blocks(const at::Tensor& squares);

/// compute = weights rounded to bfloat16.
void round_weights(const at::Tensor& weights, const at::Tensor& compute);

/// compute and remainders = weights in two halves (kernels/adamw.h).
void split_weights(const at::Tensor& weights, const at::Tensor& compute, const at::Tensor& remainders);

using AdamWLauncher = void(const AdamWBuffers& buffers, const AdamWSettings& settings, std::int64_t step,
                           double grad_scale);
extern runtime::CudaSlot<AdamWLauncher> adamw_step_cuda;
extern runtime::CudaSlot<at::Tensor(const at::Tensor& x)> block_squares_cuda;

}  // namespace nemo_rl::ops
