// RMS normalisation on CUDA: a warp a row where rows are short (heads), a block where they are long. How a row is
// summed depends on its length alone.
#include "kernels/cuda/group_reduce.cuh"
#include "kernels/cuda/model_launchers.h"
#include "kernels/cuda/vector_access.cuh"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kWarpRow = 512;  // rows up to this length go to a warp

template <class X, class T, int Threads>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(RmsNormForwardArgs<X, T> p, std::int64_t rows, bool vectors) {
  __shared__ float shared[kThreads / kWarp];
  const std::int64_t r = blockIdx.x * std::int64_t{kThreads / Threads} + threadIdx.x / Threads;
  if (r >= rows) return;  // a whole warp, or nobody: with a block a row there is a block for every row
  const std::int64_t o = r / p.inner, i = r % p.inner, first = threadIdx.x % Threads * std::int64_t{kEight};
  const X* const x = p.x + o * p.stride_x + i * p.D;
  T* const y = p.y + o * p.stride_y + i * p.D;
  float sum = 0, v[kEight], w[kEight];
  for (std::int64_t d = first; d < p.D; d += Threads * kEight) {
    load8(x + d, p.D - d, vectors, v);
#pragma unroll
    for (int k = 0; k < kEight; ++k) sum = fmaf(v[k], v[k], sum);
  }
  sum = group_all<Threads>(sum, AddOp(), shared);
  const float offset = static_cast<float>(p.offset),
              rstd = 1.0f / sqrtf(sum / static_cast<float>(p.D) + static_cast<float>(p.eps));
  if (p.rstd != nullptr && first == 0) p.rstd[r] = rstd;
  for (std::int64_t d = first; d < p.D; d += Threads * kEight) {
    load8(x + d, p.D - d, vectors, v);
    load8(p.w + d, p.D - d, vectors, w);
#pragma unroll
    for (int k = 0; k < kEight; ++k) v[k] = v[k] * rstd * (offset + w[k]);
    store8(y + d, p.D - d, vectors, v);
  }
}

/// dx may be dy itself: a thread reads its values before it writes them.
template <class X, class G, class T, int Threads>
__global__ void __launch_bounds__(kThreads)
    backward_kernel(RmsNormBackwardArgs<X, G, T> p, std::int64_t rows, bool vectors) {
  __shared__ float shared[kThreads / kWarp];
  const std::int64_t r = blockIdx.x * std::int64_t{kThreads / Threads} + threadIdx.x / Threads;
  if (r >= rows) return;
  const std::int64_t o = r / p.inner, i = r % p.inner, first = threadIdx.x % Threads * std::int64_t{kEight};
  const X* const x = p.x + o * p.stride_x + i * p.D;
  const G* const dy = p.dy + o * p.stride_dy + i * p.D;
  X* const dx = p.dx + o * p.stride_dx + i * p.D;
  const float offset = static_cast<float>(p.offset);
  float dot = 0, v[kEight], w[kEight], g[kEight];
  for (std::int64_t d = first; d < p.D; d += Threads * kEight) {
    load8(x + d, p.D - d, vectors, v);
    load8(p.w + d, p.D - d, vectors, w);
    load8(dy + d, p.D - d, vectors, g);
#pragma unroll
    for (int k = 0; k < kEight; ++k) dot = fmaf((offset + w[k]) * g[k], v[k], dot);
  }
  dot = group_all<Threads>(dot, AddOp(), shared);
  const float rstd = p.rstd[r], scale = dot * rstd * rstd * rstd / static_cast<float>(p.D);
  for (std::int64_t d = first; d < p.D; d += Threads * kEight) {
    load8(x + d, p.D - d, vectors, v);
    load8(p.w + d, p.D - d, vectors, w);
    load8(dy + d, p.D - d, vectors, g);
#pragma unroll
    for (int k = 0; k < kEight; ++k) g[k] = rstd * (offset + w[k]) * g[k] - scale * v[k];
    if (p.accumulate) {
      load8(dx + d, p.D - d, vectors, v);
#pragma unroll
      for (int k = 0; k < kEight; ++k) g[k] += v[k];
    }
    store8(dx + d, p.D - d, vectors, g);
  }
}

/// parts[block of rows, d] = sum of dy · x · rstd over the block's rows, in order.
template <class X, class G, class T>
__global__ void __launch_bounds__(kThreads)
    weight_kernel(RmsNormBackwardArgs<X, G, T> p, std::int64_t groups, float* parts) {
  const std::int64_t d = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (d >= p.D) return;
  const std::int64_t begin = blockIdx.y * kRowsPerPart,
                     end = begin + kRowsPerPart < groups ? begin + kRowsPerPart : groups;
  float sum = 0;
  for (std::int64_t o = begin; o < end; ++o)
    for (std::int64_t i = 0; i < p.inner; ++i)
      sum += widen(p.dy[o * p.stride_dy + i * p.D + d]) * widen(p.x[o * p.stride_x + i * p.D + d]) *
             p.rstd[o * p.inner + i];
  parts[blockIdx.y * p.D + d] = sum;
}

}  // namespace

template <class X, class T>
cudaError_t rms_norm_forward_launch(const RmsNormForwardArgs<X, T>& p, std::int64_t groups, cudaStream_t stream) {
  const std::int64_t rows = groups * p.inner;
  if (rows == 0) return cudaSuccess;
  const bool vectors =
      p.D % kEight == 0 && vectorizable(p.x, p.stride_x) && vectorizable(p.w, p.D) && vectorizable(p.y, p.stride_y);
  if (p.D <= kWarpRow) {
    constexpr int each = kThreads / kWarp;
    forward_kernel<X, T, kWarp>
        <<<static_cast<unsigned>((rows + each - 1) / each), kThreads, 0, stream>>>(p, rows, vectors);
  } else {
    forward_kernel<X, T, kThreads><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(p, rows, vectors);
  }
  return cudaGetLastError();
}

template <class X, class G, class T>
cudaError_t rms_norm_backward_launch(const RmsNormBackwardArgs<X, G, T>& p, std::int64_t groups, float* parts,
                                     float* dw, cudaStream_t stream) {
  const std::int64_t rows = groups * p.inner, num_parts = (groups + kRowsPerPart - 1) / kRowsPerPart;
  if (rows == 0) return cudaSuccess;
  // before dx is written, which may be dy
  const dim3 grid(static_cast<unsigned>((p.D + kThreads - 1) / kThreads), static_cast<unsigned>(num_parts));
  weight_kernel<X, G, T><<<grid, kThreads, 0, stream>>>(p, groups, parts);
  if (const cudaError_t status = add_parts_launch(parts, num_parts, p.D, dw, stream); status != cudaSuccess)
    return status;
  const bool vectors = p.D % kEight == 0 && vectorizable(p.x, p.stride_x) && vectorizable(p.w, p.D) &&
                       vectorizable(p.dy, p.stride_dy) && vectorizable(p.dx, p.stride_dx);
  if (p.D <= kWarpRow) {
    constexpr int each = kThreads / kWarp;
    backward_kernel<X, G, T, kWarp>
        <<<static_cast<unsigned>((rows + each - 1) / each), kThreads, 0, stream>>>(p, rows, vectors);
  } else {
    backward_kernel<X, G, T, kThreads><<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(p, rows, vectors);
  }
  return cudaGetLastError();
}

template cudaError_t rms_norm_forward_launch(const RmsNormForwardArgs<float, float>&, std::int64_t, cudaStream_t);
template cudaError_t rms_norm_forward_launch(const RmsNormForwardArgs<float, bfloat16>&, std::int64_t, cudaStream_t);
template cudaError_t rms_norm_forward_launch(const RmsNormForwardArgs<bfloat16, bfloat16>&, std::int64_t, cudaStream_t);
template cudaError_t rms_norm_backward_launch(const RmsNormBackwardArgs<float, float, float>&, std::int64_t, float*,
                                              float*, cudaStream_t);
template cudaError_t rms_norm_backward_launch(const RmsNormBackwardArgs<float, float, bfloat16>&, std::int64_t, float*,
                                              float*, cudaStream_t);
template cudaError_t rms_norm_backward_launch(const RmsNormBackwardArgs<bfloat16, bfloat16, bfloat16>&, std::int64_t,
                                              float*, float*, cudaStream_t);

}  // namespace nemo_rl::kernels
