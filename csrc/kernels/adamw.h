// AdamW with decoupled weight decay (Loshchilov and Hutter, 2019), torch.optim.AdamW's arithmetic, over flat buffers.
// Moments are kept in the weights' type, in bfloat16, or both in eight bits. A second moment that decays by a
// thousandth a step would stand still in them when rounded to nearest, so moments are rounded up or down by a hash of
// their place and the step, with the odds that keep them right on average. The same step gives the same bits again.
//
// In eight bits the second moment v is a float of six bits of exponent and two of mantissa, up to 56. The first moment
// m is kept as m / sqrt(v), which is what an update uses, and which is at most 7.3 with the usual betas: a sign, three
// bits of exponent and four of mantissa. Both are thus independent of the scale of the gradients, without a scale for
// each block.
#pragma once
#include <cmath>
#include <cstdint>
#include <type_traits>

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
  std::int64_t first;        ///< place of element 0 in the whole buffer, of which this may be a shard
  std::int16_t* remainders;  ///< the weights are join_halves(compute, remainders), not `weights`; nullptr: they are not
};

/// A float32 from a bfloat16 and the 16 bits that it lacks, and the two from a float32. The bfloat16 is the nearest
/// one; of two equally near the one further from 0, as with nearest-even 17 bits would be lacking.
NRL_INLINE float join_halves(bfloat16 upper, std::int16_t lower) {
  return __builtin_bit_cast(float, (static_cast<std::uint32_t>(upper.bits) << 16) +
                                       static_cast<std::uint32_t>(static_cast<std::int32_t>(lower)));
}
NRL_INLINE void split_halves(float x, bfloat16& upper, std::int16_t& lower) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  upper.bits = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
  lower = static_cast<std::int16_t>(bits & 0xffffu);
}
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

/// Numbers from 0 on in few bits: x + 2^kLowest as a float with kMantissa bits of mantissa, whose exponent begins at
/// kLowest. So steps are equal below 2^kLowest, and 0 is exact. Values beyond the code kMost become kMost.
template <int kMantissa, int kLowest, std::uint32_t kMost>
struct SmallFloat {
  static constexpr int kCut = 23 - kMantissa;  // of a float's bits
  static constexpr std::uint32_t kBase = static_cast<std::uint32_t>(127 + kLowest) << kMantissa;
  static NRL_INLINE_MEMBER float offset() { return __builtin_bit_cast(float, kBase << kCut); }
  static NRL_INLINE_MEMBER float value(std::uint32_t code) {
    return __builtin_bit_cast(float, (kBase + code) << kCut) - offset();
  }
  /// `draw`: 16 random bits.
  static NRL_INLINE_MEMBER std::uint32_t code(float x, std::uint32_t draw) {
    const std::uint32_t found =
        ((__builtin_bit_cast(std::uint32_t, x + offset()) + (draw << (kCut - 16))) >> kCut) - kBase;
    return found < kMost ? found : kMost;
  }
};
using SmallRatio = SmallFloat<4, -5, 127>;
using SmallSquare = SmallFloat<2, -58, 255>;

/// The moments of a weight from what is stored.
template <class A, class M, class V>
NRL_INLINE void read_moments(M kept_m, V kept_v, A& m, A& v) {
  if constexpr (std::is_same_v<M, std::uint8_t>) {
    v = SmallSquare::value(kept_v);
    m = SmallRatio::value(kept_m & 127u) * std::sqrt(v);
    m = kept_m & 128u ? -m : m;
  } else {
    m = static_cast<A>(kept_m);
    v = static_cast<A>(kept_v);
  }
}

/// Stores the moments; `draw`: 32 random bits.
template <class A, class M, class V>
NRL_INLINE void keep_moments(A m, A v, std::uint32_t draw, M& kept_m, V& kept_v) {
  static_assert(std::is_same_v<M, std::uint8_t> == std::is_same_v<V, std::uint8_t>);
  if constexpr (std::is_same_v<M, std::uint8_t>) {
    const std::uint32_t square = SmallSquare::code(v, draw >> 16);
    const float root = std::sqrt(SmallSquare::value(square)), size = std::fabs(m);
    const float ratio = size < 8.0f * root ? size / root : square > 0 ? 8.0f : 0.0f;
    kept_v = static_cast<std::uint8_t>(square);
    kept_m = static_cast<std::uint8_t>(SmallRatio::code(ratio, draw & 0xffffu) | (m < 0 ? 128u : 0u));
  } else {
    kept_m = keep_moment<M>(m, draw & 0xffffu);
    kept_v = keep_moment<V>(v, draw >> 16);
  }
}

template <class A, class M = A, class V = A>
using AdamW = void(const AdamWArgs<A, M, V>&, std::int64_t begin, std::int64_t end);
using AdamWBothShort = AdamW<float, bfloat16, bfloat16>;
using AdamWFirstShort = AdamW<float, bfloat16, float>;
using AdamWSecondShort = AdamW<float, float, bfloat16>;
using AdamWBothEight = AdamW<float, std::uint8_t, std::uint8_t>;
NRL_DECLARE_CPU_KERNEL(adamw_f32, AdamW<float>);
NRL_DECLARE_CPU_KERNEL(adamw_f64, AdamW<double>);
NRL_DECLARE_CPU_KERNEL(adamw_f32_bf16_bf16, AdamWBothShort);
NRL_DECLARE_CPU_KERNEL(adamw_f32_bf16_f32, AdamWFirstShort);
NRL_DECLARE_CPU_KERNEL(adamw_f32_f32_bf16, AdamWSecondShort);
NRL_DECLARE_CPU_KERNEL(adamw_f32_u8_u8, AdamWBothEight);

/// Sum of squares of x[begin, end) in double, in a fixed order.
template <class A>
using SumOfSquares = double(const A* x, std::int64_t n);
NRL_DECLARE_CPU_KERNEL(sum_of_squares_f32, SumOfSquares<float>);
NRL_DECLARE_CPU_KERNEL(sum_of_squares_f64, SumOfSquares<double>);

}  // namespace nemo_rl::kernels
