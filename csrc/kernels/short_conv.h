// A causal convolution of each channel over the last few tokens, and silu: y[t, c] = silu(bias[c] + sum_i w[c, i] · x[t
// - W + 1 + i, c]), i ascending, one chain of multiply-adds. Tokens before a text's first are zeros. LFM2 has no silu.
#pragma once
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"

namespace nemo_rl::kernels {

template <class T>
struct ShortConvArgs {
  const T* x;  ///< [T, C]
  std::int64_t stride_x;
  /// [T, W - 1]: the rows of the tokens before each, the earliest first; nullptr: zeros.
  const T* const* before;
  const accumulate_t<T>* w;     ///< [W, C]
  const accumulate_t<T>* bias;  ///< [C]; nullptr: none
  std::int64_t C, W;            ///< C a multiple of 16
  bool silu;                    ///< false: y is the sum
};
/// Gradients of w [C, W] and bias [C], which are added to; nullptr: not wanted.
template <class T>
struct ShortConvGradients {
  accumulate_t<T>*w, *bias;
};

/// y [T, C] of rows [begin, end).
template <class T>
using ShortConvForward = void(const ShortConvArgs<T>& p, T* y, std::int64_t stride_y, std::int64_t begin,
                              std::int64_t end);
NRL_DECLARE_CPU_KERNEL(short_conv_forward_f32, ShortConvForward<float>);
NRL_DECLARE_CPU_KERNEL(short_conv_forward_f64, ShortConvForward<double>);
NRL_DECLARE_CPU_KERNEL(short_conv_forward_bf16, ShortConvForward<bfloat16>);

/// Channels that the backward takes at a time.
inline constexpr std::int64_t kConvChannels = 64;
/// Of channels [begin, end), at most kConvChannels, of all `rows` rows, whose `before` are rows of x: dx [T, C] from dy
/// [T, C]; adds to `d`. `sum` is a scratch of rows · (end - begin) elements.
template <class T>
using ShortConvBackward = void(const ShortConvArgs<T>& p, const T* dy, std::int64_t stride_dy, T* dx,
                               std::int64_t stride_dx, const ShortConvGradients<T>& d, std::int64_t rows,
                               accumulate_t<T>* sum, std::int64_t begin, std::int64_t end);
NRL_DECLARE_CPU_KERNEL(short_conv_backward_f32, ShortConvBackward<float>);
NRL_DECLARE_CPU_KERNEL(short_conv_backward_f64, ShortConvBackward<double>);
NRL_DECLARE_CPU_KERNEL(short_conv_backward_bf16, ShortConvBackward<bfloat16>);

}  // namespace nemo_rl::kernels
