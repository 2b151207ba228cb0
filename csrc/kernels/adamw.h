// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), torch.optim.AdamW's arithmetic, over flat buffers.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"
#include "common/host_device.h"

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
/// What does not depend on the weight, in the weights' type.
template <class A>
struct AdamWConstants {
  A decay, scale, beta1, beta2, eps, one_minus_beta1, one_minus_beta2, step_size, sqrt_correction;
};
template <class A>
NRL_INLINE AdamWConstants<A> adamw_constants(const AdamWArgs<A>& p) {
  return {static_cast<A>(1.0 - p.lr * p.weight_decay),
          static_cast<A>(p.grad_scale),
          static_cast<A>(p.beta1),
          static_cast<A>(p.beta2),
          static_cast<A>(p.eps),
          static_cast<A>(1.0 - p.beta1),
          static_cast<A>(1.0 - p.beta2),
          static_cast<A>(p.lr / p.bias_correction1),
          static_cast<A>(std::sqrt(p.bias_correction2))};
}

/// One weight: moments m and v and the weight w are brought up to date with gradient `grad`.
template <class A>
NRL_INLINE void adamw_update(const AdamWConstants<A>& c, A grad, A& w, A& m, A& v) {
  const A g = grad * c.scale;
  m = c.beta1 * m + c.one_minus_beta1 * g;
  v = c.beta2 * v + c.one_minus_beta2 * g * g;
  w = w * c.decay - c.step_size * (m / (std::sqrt(v) / c.sqrt_correction + c.eps));
}

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
