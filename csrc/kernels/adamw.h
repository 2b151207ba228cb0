// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), torch.optim.AdamW's arithmetic, over flat buffers.
#pragma once
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"

namespace nemo_rl::kernels {

template <class A>
struct AdamWArgs {
  A* weights;
  const A* grads;
  A* exp_avg;
  A* exp_avg_sq;
  bfloat16* compute;  ///< rounded copy of the weights for bfloat16 models; nullptr: none
  double lr, beta1, beta2, eps, weight_decay;
  double bias_correction1, bias_correction2;  ///< 1 - beta^step
  double grad_scale;                          ///< gradients are multiplied by this first (clipping)
};
template <class A>
using AdamW = void(const AdamWArgs<A>&, std::int64_t begin, std::int64_t end);
NRL_DECLARE_CPU_KERNEL(adamw_f32, AdamW<float>);
NRL_DECLARE_CPU_KERNEL(adamw_f64, AdamW<double>);

/// Sum of squares of x[begin, end) in double, in a fixed order.
template <class A>
using SumOfSquares = double(const A* x, std::int64_t n);
NRL_DECLARE_CPU_KERNEL(sum_of_squares_f32, SumOfSquares<float>);
NRL_DECLARE_CPU_KERNEL(sum_of_squares_f64, SumOfSquares<double>);

}  // namespace nemo_rl::kernels
