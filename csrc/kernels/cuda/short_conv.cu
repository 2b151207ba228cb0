// The short convolution of recurrent layers on CUDA, a thread a value. The terms of a sum have the CPU's order.
#include "kernels/cuda/model_launchers.h"
#include "kernels/cuda/recurrence_launchers.h"
#include "kernels/cuda/vector_access.cuh"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;

/// f(i) for i < items, a thread each.
template <class F>
__device__ __forceinline__ void for_items(std::int64_t items, const F& f) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < items;
       i += std::int64_t{kThreads} * gridDim.x)
    f(i);
}

/// The input of tap i of a row.
template <class T>
__device__ __forceinline__ float input_of(const CudaConv<T>& p, std::int64_t row, std::int64_t i, std::int64_t c) {
  if (i + 1 == p.W) return widen(p.x[row * p.stride_x + c]);
  const std::int64_t place = p.before[row * (p.W - 1) + i];
  if (place >= 0) return widen(p.x[place * p.stride_x + c]);
  return place == kNoInput ? 0.0f : widen(p.state[(-2 - place) * p.C + c]);
}

template <class T>
__device__ __forceinline__ float convolved(const CudaConv<T>& p, std::int64_t row, std::int64_t c) {
  float sum = p.bias == nullptr ? 0.0f : widen(p.bias[c]);
  for (std::int64_t i = 0; i < p.W; ++i)
    if (i + 1 == p.W || p.before[row * (p.W - 1) + i] != kNoInput)
      sum = fmaf(input_of(p, row, i, c), widen(p.w[c * p.W + i]), sum);
  return sum;
}

__device__ __forceinline__ float sigmoid_of(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }

template <class T>
__global__ void __launch_bounds__(kThreads) forward_kernel(CudaConv<T> p, T* y, std::int64_t stride_y) {
  for_items(p.rows * p.C, [&](std::int64_t item) {
    const std::int64_t row = item / p.C, c = item % p.C;
    const float sum = convolved(p, row, c);
    y[row * stride_y + c] = static_cast<T>(p.silu ? __fmul_rn(sum, sigmoid_of(sum)) : sum);
  });
}

/// The inputs that the tokens after a sequence will read.
template <class T>
__global__ void __launch_bounds__(kThreads)
    store_kernel(CudaConv<T> p, const RecurrentSequence* sequences, std::int64_t count) {
  for_items(count * p.C, [&](std::int64_t item) {
    const RecurrentSequence s = sequences[item / p.C];
    if (s.slot == RecurrentSequence::kNone) return;
    const std::int64_t c = item % p.C;
    T* const slot = p.state + s.slot * (p.W - 1) * p.C + c;
    for (std::int64_t i = 0; i + 1 < p.W; ++i) {
      const std::int64_t token = s.length - (p.W - 1) + i;
      slot[i * p.C] = token >= 0    ? p.x[(s.start + token) * p.stride_x + c]
                      : s.continues ? slot[(i + s.length) * p.C]
                                    : T{};
    }
  });
}

/// du: the gradient of the sum.
template <class T>
__global__ void __launch_bounds__(kThreads) inner_kernel(CudaConv<T> p, CudaConvGradients<T> d) {
  for_items(p.rows * p.C, [&](std::int64_t item) {
    const std::int64_t row = item / p.C, c = item % p.C;
    float du = widen(d.dy[row * d.stride_dy + c]);
    if (p.silu) {
      const float u = convolved(p, row, c), s = sigmoid_of(u);
      du = du * s * (u * (1.0f - s) + 1.0f);
    }
    d.du[item] = du;
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads) inputs_kernel(CudaConv<T> p, CudaConvGradients<T> d) {
  for_items(p.rows * p.C, [&](std::int64_t item) {
    const std::int64_t row = item / p.C, c = item % p.C;
    float sum = 0;
    for (std::int64_t i = d.first[row]; i < d.first[row + 1]; ++i)
      sum = fmaf(widen(p.w[c * p.W + d.readers[i] % p.W]), d.du[d.readers[i] / p.W * p.C + c], sum);
    d.dx[row * d.stride_dx + c] = static_cast<T>(sum);
  });
}

/// parts [part, c · W + i]: the sum over kRowsPerPart rows of what they add to the gradient of tap i of channel c.
template <class T>
__global__ void __launch_bounds__(kThreads) weights_kernel(CudaConv<T> p, CudaConvGradients<T> d) {
  const std::int64_t columns = p.C * p.W, num_parts = (p.rows + kRowsPerPart - 1) / kRowsPerPart;
  for_items(num_parts * columns, [&](std::int64_t item) {
    const std::int64_t c = item % columns / p.W, i = item % p.W, begin = item / columns * kRowsPerPart,
                       end = begin + kRowsPerPart < p.rows ? begin + kRowsPerPart : p.rows;
    float sum = 0;
    for (std::int64_t row = begin; row < end; ++row) sum = fmaf(input_of(p, row, i, c), d.du[row * p.C + c], sum);
    d.parts[item] = sum;
  });
}

}  // namespace

template <class T>
cudaError_t short_conv_forward_launch(const CudaConv<T>& p, T* y, std::int64_t stride_y,
                                      const RecurrentSequence* sequences, std::int64_t count, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  forward_kernel<T><<<grid_for(p.rows * p.C, kThreads), kThreads, 0, stream>>>(p, y, stride_y);
  if (p.state != nullptr)
    store_kernel<T><<<grid_for(count * p.C, kThreads), kThreads, 0, stream>>>(p, sequences, count);
  return cudaGetLastError();
}

template <class T>
cudaError_t short_conv_backward_launch(const CudaConv<T>& p, const CudaConvGradients<T>& d, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const std::int64_t num_parts = (p.rows + kRowsPerPart - 1) / kRowsPerPart;
  inner_kernel<T><<<grid_for(p.rows * p.C, kThreads), kThreads, 0, stream>>>(p, d);
  inputs_kernel<T><<<grid_for(p.rows * p.C, kThreads), kThreads, 0, stream>>>(p, d);
  if (d.dw != nullptr) {
    weights_kernel<T><<<grid_for(num_parts * p.C * p.W, kThreads), kThreads, 0, stream>>>(p, d);
    if (const auto status = add_parts_launch(d.parts, num_parts, p.C * p.W, d.dw, stream); status != cudaSuccess)
      return status;
  }
  if (d.d_bias != nullptr) return add_column_sums_launch(d.du, p.C, p.rows, p.C, d.parts, d.d_bias, stream);
  return cudaGetLastError();
}

template cudaError_t short_conv_forward_launch(const CudaConv<float>&, float*, std::int64_t, const RecurrentSequence*,
                                               std::int64_t, cudaStream_t);
template cudaError_t short_conv_forward_launch(const CudaConv<bfloat16>&, bfloat16*, std::int64_t,
                                               const RecurrentSequence*, std::int64_t, cudaStream_t);
template cudaError_t short_conv_backward_launch(const CudaConv<float>&, const CudaConvGradients<float>&, cudaStream_t);
template cudaError_t short_conv_backward_launch(const CudaConv<bfloat16>&, const CudaConvGradients<bfloat16>&,
                                                cudaStream_t);

}  // namespace nemo_rl::kernels
