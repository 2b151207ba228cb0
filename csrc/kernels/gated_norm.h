// The norm behind a recurrence. Of each head of D numbers in a gated delta net: y = w · x · rstd · silu(z), rstd = 1 /
// sqrt(mean(x^2) + eps). Of each of a few heads in Mamba-2, where the gate comes first and w differs from head to head:
// y = w · g · rstd, g = x · silu(z), rstd = 1 / sqrt(mean(g^2) + eps). The sums of squares run over 16 lanes, which are
// added as a fixed tree. And the gate of an attention's heads, y = x · sigmoid(g).
#pragma once
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"

namespace nemo_rl::kernels {

template <class T>
struct GatedNormArgs {
  const T* x;  ///< [T, heads·D]
  std::int64_t stride_x;
  const T* z;  ///< like x
  std::int64_t stride_z;
  const T* w;             ///< [D], or [heads·D] with gate_first
  std::int64_t heads, D;  ///< D a multiple of 16
  double eps;
  bool gate_first = false;
};
/// y [T, heads·D] of rows [begin, end).
template <class T>
using GatedNormForward = void(const GatedNormArgs<T>& p, T* y, std::int64_t stride_y, std::int64_t begin,
                              std::int64_t end);
NRL_DECLARE_CPU_KERNEL(gated_norm_forward_f32, GatedNormForward<float>);
NRL_DECLARE_CPU_KERNEL(gated_norm_forward_f64, GatedNormForward<double>);
NRL_DECLARE_CPU_KERNEL(gated_norm_forward_bf16, GatedNormForward<bfloat16>);

/// dx (may be dy) and dz from dy; dw, like w, is overwritten with the share of the rows [begin, end).
template <class T>
struct GatedNormGradients {
  const T* dy;
  std::int64_t stride_dy;
  T* dx;
  std::int64_t stride_dx;
  T* dz;
  std::int64_t stride_dz;
};
template <class T>
using GatedNormBackward = void(const GatedNormArgs<T>& p, const GatedNormGradients<T>& g, std::int64_t begin,
                               std::int64_t end, accumulate_t<T>* dw);
NRL_DECLARE_CPU_KERNEL(gated_norm_backward_f32, GatedNormBackward<float>);
NRL_DECLARE_CPU_KERNEL(gated_norm_backward_f64, GatedNormBackward<double>);
NRL_DECLARE_CPU_KERNEL(gated_norm_backward_bf16, GatedNormBackward<bfloat16>);

/// Heads of D numbers; those of x and y lie side by side, those of g `head_stride_g` elements apart.
template <class T>
struct HeadGateArgs {
  const T* x;  ///< [T, heads·D]
  const T* g;
  std::int64_t stride_g, head_stride_g;
  std::int64_t heads, D;
};
template <class T>
using HeadGateForward = void(const HeadGateArgs<T>& p, T* y, std::int64_t begin, std::int64_t end);
NRL_DECLARE_CPU_KERNEL(head_gate_forward_f32, HeadGateForward<float>);
NRL_DECLARE_CPU_KERNEL(head_gate_forward_f64, HeadGateForward<double>);
NRL_DECLARE_CPU_KERNEL(head_gate_forward_bf16, HeadGateForward<bfloat16>);

/// dx (may be dy) and dg, which lies like g, from dy.
template <class T>
using HeadGateBackward = void(const HeadGateArgs<T>& p, const T* dy, T* dx, T* dg, std::int64_t begin,
                              std::int64_t end);
NRL_DECLARE_CPU_KERNEL(head_gate_backward_f32, HeadGateBackward<float>);
NRL_DECLARE_CPU_KERNEL(head_gate_backward_f64, HeadGateBackward<double>);
NRL_DECLARE_CPU_KERNEL(head_gate_backward_bf16, HeadGateBackward<bfloat16>);

}  // namespace nemo_rl::kernels
