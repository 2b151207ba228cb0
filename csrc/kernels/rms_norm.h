// Root-mean-square normalisation (Zhang and Sennrich, 2019): y = x · rstd · (offset + w), rstd = 1 / sqrt(mean(x^2) +
// eps).
#pragma once
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"

namespace nemo_rl::kernels {

/// `outer` groups of `inner` consecutive rows of size D (a token's heads; inner = 1 for hidden states).
/// X: type of x (the residual stream is kept in accumulate_t<T>), T: type of weights and y.
template <class X, class T>
struct RmsNormForwardArgs {
  const X* x;
  std::int64_t stride_x;  ///< between groups
  const T* w;             ///< [D]
  T* y;
  std::int64_t stride_y;
  accumulate_t<T>* rstd;  ///< [outer, inner]; nullptr: not kept
  std::int64_t inner, D;
  double eps, offset;
};
template <class X, class T>
using RmsNormForward = void(const RmsNormForwardArgs<X, T>&, std::int64_t begin, std::int64_t end);
NRL_DECLARE_CPU_KERNEL(rms_norm_forward_f32, RmsNormForward<float, float>);
NRL_DECLARE_CPU_KERNEL(rms_norm_forward_f64, RmsNormForward<double, double>);
NRL_DECLARE_CPU_KERNEL(rms_norm_forward_f32_bf16, RmsNormForward<float, bfloat16>);
NRL_DECLARE_CPU_KERNEL(rms_norm_forward_bf16, RmsNormForward<bfloat16, bfloat16>);

/// dx (+)= rstd · (v·dy - x̂ · mean(v·dy·x̂)) with x̂ = x · rstd and v = offset + w; dw[D] = sum over the rows of dy · x̂.
template <class X, class G, class T>
struct RmsNormBackwardArgs {
  const G* dy;
  std::int64_t stride_dy;
  const X* x;
  std::int64_t stride_x;
  const T* w;
  const accumulate_t<T>* rstd;
  X* dx;
  std::int64_t stride_dx;
  bool accumulate;
  std::int64_t inner, D;
  double offset;
};
/// `dw` is overwritten with the share of groups [begin, end).
template <class X, class G, class T>
using RmsNormBackward = void(const RmsNormBackwardArgs<X, G, T>&, std::int64_t begin, std::int64_t end,
                             accumulate_t<T>* dw);
NRL_DECLARE_CPU_KERNEL(rms_norm_backward_f32, RmsNormBackward<float, float, float>);
NRL_DECLARE_CPU_KERNEL(rms_norm_backward_f64, RmsNormBackward<double, double, double>);
NRL_DECLARE_CPU_KERNEL(rms_norm_backward_f32_bf16, RmsNormBackward<float, float, bfloat16>);
NRL_DECLARE_CPU_KERNEL(rms_norm_backward_bf16, RmsNormBackward<bfloat16, bfloat16, bfloat16>);

}  // namespace nemo_rl::kernels
