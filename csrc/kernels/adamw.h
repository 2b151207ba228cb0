// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), torch.optim.AdamW's arithmetic, over flat buffers.
// Moments are kept in the weights' type or in bfloat16. A bfloat16 has eight bits: a second moment that decays by a
// thousandth a step would stand still when rounded to nearest, so moments are rounded up or down by a hash of their
// place and the step, with the odds that keep them right on average. The same step gives the same bits again.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"
#include "common/host_device.h"

namespace nemo_rl::kernels {

/// M, V: what the first and the second moment are kept in.
template <class A, class M = A, class V = A>
struct AdamWArgs {
  A* weights;
  const A* grads;
  M* exp_avg;
  V* exp_avg_sq;
  bfloat16* compute;  ///< rounded copy of the weights for bfloat16 models; nullptr: none
  double lr, beta1, beta2, eps, weight_decay;
  double bias_correction1, bias_correction2;  ///< 1 - beta^step
  double grad_scale;                          ///< gradients are multiplied by this first (clipping)
  std::int64_t step;
  std::int64_t first;  ///< place of element 0 in the whole buffer, of which this may be a shard
};
/// What does not depend on the weight, in the weights' type.
template <class A>
struct AdamWConstants {
  A decay, scale, beta1, beta2, eps, one_minus_beta1, one_minus_beta2, step_size, sqrt_correction;
};
template <class A, class M, class V>
NRL_INLINE AdamWConstants<A> adamw_constants(const AdamWArgs<A, M, V>& p) {
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

/// 32 bits for the moments of element `i` of the whole buffer in a step (Wellons' lowbias32 over both numbers).
NRL_INLINE std::uint32_t adamw_draw(std::int64_t i, std::int64_t step) {
  std::uint32_t h = static_cast<std::uint32_t>(i) ^ static_cast<std::uint32_t>(step) * 0x9e3779b1u;
  h ^= static_cast<std::uint32_t>(i >> 32) * 0x85ebca77u;
  h = (h ^ h >> 16) * 0x7feb352du;
  h = (h ^ h >> 15) * 0x846ca68bu;
  return h ^ h >> 16;
}

/// The value that is stored for a moment; `draw`: 16 random bits, which a float does not need.
template <class M, class A>
NRL_INLINE M keep_moment(A x, std::uint32_t draw) {
  if constexpr (sizeof(M) == sizeof(bfloat16)) {
    M kept;
    kept.bits = static_cast<std::uint16_t>((__builtin_bit_cast(std::uint32_t, x) + draw) >> 16);
    return kept;
  } else {
    return x;
  }
}

template <class A, class M = A, class V = A>
using AdamW = void(const AdamWArgs<A, M, V>&, std::int64_t begin, std::int64_t end);
using AdamWBothShort = AdamW<float, bfloat16, bfloat16>;
using AdamWFirstShort = AdamW<float, bfloat16, float>;
using AdamWSecondShort = AdamW<float, float, bfloat16>;
NRL_DECLARE_CPU_KERNEL(adamw_f32, AdamW<float>);
NRL_DECLARE_CPU_KERNEL(adamw_f64, AdamW<double>);
NRL_DECLARE_CPU_KERNEL(adamw_f32_bf16_bf16, AdamWBothShort);
NRL_DECLARE_CPU_KERNEL(adamw_f32_bf16_f32, AdamWFirstShort);
NRL_DECLARE_CPU_KERNEL(adamw_f32_f32_bf16, AdamWSecondShort);

/// Sum of squares of x[begin, end) in double, in a fixed order.
template <class A>
using SumOfSquares = double(const A* x, std::int64_t n);
NRL_DECLARE_CPU_KERNEL(sum_of_squares_f32, SumOfSquares<float>);
NRL_DECLARE_CPU_KERNEL(sum_of_squares_f64, SumOfSquares<double>);

}  // namespace nemo_rl::kernels
