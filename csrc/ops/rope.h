// Rotary position embedding in place.
#pragma once
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

/// Rotates the first `heads` heads of size H of every row of x [T, >= (heads - 1)·H + R] in place by the row's position
/// (positions [T] int64; cos, sin float32 [max position + 1, R/2], which rotate the first R dimensions of a head).
/// `inverse` is the backward pass. `interleaved`: see kernels/rope.h.
void rope(const at::Tensor& x, std::int64_t heads, std::int64_t H, const at::Tensor& positions, const at::Tensor& cos,
          const at::Tensor& sin, bool inverse = false, bool interleaved = false);

using RopeLauncher = void(const at::Tensor& x, std::int64_t heads, std::int64_t H, const at::Tensor& positions,
                          const at::Tensor& cos, const at::Tensor& sin, bool inverse, bool interleaved);
extern runtime::CudaSlot<RopeLauncher> rope_cuda;

}  // namespace nemo_rl::ops
