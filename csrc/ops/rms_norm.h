// Root-mean-square normalisation with its gradient.
#pragma once
#include <optional>

#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

/// y = x · rstd · (offset + w) over the last `D = w.numel()` elements; x [T, inner·D] (rows may be strided), y alike,
/// rstd [T, inner] (kept for the backward pass if given). x is in the dtype of w or in its accumulation dtype.
void rms_norm_forward(const at::Tensor& x, const at::Tensor& w, double eps, double offset, const at::Tensor& y,
                      const std::optional<at::Tensor>& rstd);

/// dx (+)= gradient of x; dw [D] += gradient of w (in the accumulation dtype). The sum over rows runs in blocks of
/// fixed size that are added in order, so it does not depend on threads.
void rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, double offset,
                       const at::Tensor& rstd, const at::Tensor& dx, bool accumulate, const at::Tensor& dw);

using RmsNormForwardLauncher = void(const at::Tensor& x, const at::Tensor& w, double eps, double offset,
                                    const at::Tensor& y, const std::optional<at::Tensor>& rstd);
using RmsNormBackwardLauncher = void(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, double offset,
                                     const at::Tensor& rstd, const at::Tensor& dx, bool accumulate,
                                     const at::Tensor& dw);
extern runtime::CudaSlot<RmsNormForwardLauncher> rms_norm_forward_cuda;
extern runtime::CudaSlot<RmsNormBackwardLauncher> rms_norm_backward_cuda;

}  // namespace nemo_rl::ops
