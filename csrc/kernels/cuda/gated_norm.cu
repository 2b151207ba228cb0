// The norm behind a recurrence and the gate of an attention's heads on CUDA: a warp a head, whose sums of squares
// depend on this head alone.
#include "kernels/cuda/group_reduce.cuh"
#include "kernels/cuda/recurrence_launchers.h"
#include "kernels/cuda/vector_access.cuh"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

__device__ __forceinline__ float sigmoid_of(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x))); }

/// One head of one row. Lanes take every 32nd number.
template <bool GateFirst, class T>
struct NormHead {
  const T *x, *z, *w;
  std::int64_t D;
  float eps;
  std::int64_t row, column;
  __device__ NormHead(const GatedNormArgs<T>& p, std::int64_t item) : D(p.D), eps(static_cast<float>(p.eps)) {
    const std::int64_t head = item % p.heads;
    row = item / p.heads, column = head * p.D;
    x = p.x + row * p.stride_x + column, z = p.z + row * p.stride_z + column;
    w = p.w + (GateFirst ? column : 0);
  }
  template <class F>
  __device__ __forceinline__ void for_numbers(const F& f) const {
    for (std::int64_t d = threadIdx.x % kWarp; d < D; d += kWarp) f(d);
  }
  /// silu of the gate.
  __device__ __forceinline__ float gate(std::int64_t d) const {
    const float g = widen(z[d]);
    return __fmul_rn(g, sigmoid_of(g));
  }
  /// What is normalised.
  __device__ __forceinline__ float value(std::int64_t d) const {
    return GateFirst ? __fmul_rn(widen(x[d]), gate(d)) : widen(x[d]);
  }
  /// The gradient of the gate's silu.
  __device__ __forceinline__ float slope(std::int64_t d) const {
    const float g = widen(z[d]), s = sigmoid_of(g);
    return s * (g * (1.0f - s) + 1.0f);
  }
  __device__ __forceinline__ float rstd() const {
    float sum = 0;
    for_numbers([&](std::int64_t d) { sum = fmaf(value(d), value(d), sum); });
    sum = warp_all(sum, AddOp());
    return __fdiv_rn(1.0f, sqrtf(__fadd_rn(__fdiv_rn(sum, static_cast<float>(D)), eps)));
  }
};

__device__ __forceinline__ std::int64_t warp_item() { return blockIdx.x * std::int64_t{kWarps} + threadIdx.x / kWarp; }

template <bool GateFirst, class T>
__global__ void __launch_bounds__(kThreads)
    norm_forward_kernel(GatedNormArgs<T> p, T* y, std::int64_t stride_y, std::int64_t rows) {
  const std::int64_t item = warp_item();
  if (item >= rows * p.heads) return;
  const NormHead<GateFirst, T> head(p, item);
  T* const out = y + head.row * stride_y + head.column;
  const float rstd = head.rstd();
  head.for_numbers([&](std::int64_t d) {
    const float normed = __fmul_rn(__fmul_rn(head.value(d), rstd), widen(head.w[d]));
    out[d] = static_cast<T>(GateFirst ? normed : __fmul_rn(normed, head.gate(d)));
  });
}

/// dx may be dy: a thread reads its number before it writes it.
template <bool GateFirst, class T>
__global__ void __launch_bounds__(kThreads)
    norm_backward_kernel(GatedNormArgs<T> p, GatedNormGradients<T> g, float* shares, std::int64_t rows) {
  const std::int64_t item = warp_item();
  if (item >= rows * p.heads) return;
  const NormHead<GateFirst, T> head(p, item);
  const T* const dy = g.dy + head.row * g.stride_dy + head.column;
  T* const dx = g.dx + head.row * g.stride_dx + head.column;
  T* const dz = g.dz + head.row * g.stride_dz + head.column;
  float* const share = shares + head.row * p.heads * p.D + head.column;
  const float rstd = head.rstd();
  // the gradient of what the weight multiplies, and of what is normalised then
  const auto scaled = [&](std::int64_t d) { return GateFirst ? widen(dy[d]) : widen(dy[d]) * head.gate(d); };
  float products = 0;
  head.for_numbers([&](std::int64_t d) {
    share[d] = scaled(d) * head.value(d) * rstd;
    products = fmaf(scaled(d) * widen(head.w[d]), head.value(d), products);
  });
  const float along = warp_all(products, AddOp()) * rstd * rstd / static_cast<float>(p.D);
  head.for_numbers([&](std::int64_t d) {
    const float d_value = (scaled(d) * widen(head.w[d]) - head.value(d) * along) * rstd;
    const float d_gate =
        GateFirst ? d_value * widen(head.x[d]) : widen(dy[d]) * widen(head.w[d]) * head.value(d) * rstd;
    dz[d] = static_cast<T>(d_gate * head.slope(d));
    dx[d] = static_cast<T>(GateFirst ? d_value * head.gate(d) : d_value);
  });
}

/// f(place of the number, place of its gate) for every number, a thread each.
template <class T, class F>
__device__ __forceinline__ void for_gates(const HeadGateArgs<T>& p, std::int64_t rows, const F& f) {
  const std::int64_t size = p.heads * p.D;
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < rows * size;
       i += std::int64_t{kThreads} * gridDim.x)
    f(i, i / size * p.stride_g + i % size / p.D * p.head_stride_g + i % p.D);
}

template <class T>
__global__ void __launch_bounds__(kThreads) gate_forward_kernel(HeadGateArgs<T> p, T* y, std::int64_t rows) {
  for_gates(p, rows, [&](std::int64_t i, std::int64_t gate) {
    y[i] = static_cast<T>(__fmul_rn(widen(p.x[i]), sigmoid_of(widen(p.g[gate]))));
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    gate_backward_kernel(HeadGateArgs<T> p, const T* dy, T* dx, T* dg, std::int64_t rows) {
  for_gates(p, rows, [&](std::int64_t i, std::int64_t gate) {
    const float s = sigmoid_of(widen(p.g[gate])), d = widen(dy[i]);
    dg[gate] = static_cast<T>(d * widen(p.x[i]) * (s * (1.0f - s)));
    dx[i] = static_cast<T>(d * s);
  });
}

unsigned warp_blocks(std::int64_t items) { return static_cast<unsigned>((items + kWarps - 1) / kWarps); }

}  // namespace

template <class T>
cudaError_t gated_norm_forward_launch(const GatedNormArgs<T>& p, T* y, std::int64_t stride_y, std::int64_t rows,
                                      cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const auto kernel = p.gate_first ? norm_forward_kernel<true, T> : norm_forward_kernel<false, T>;
  kernel<<<warp_blocks(rows * p.heads), kThreads, 0, stream>>>(p, y, stride_y, rows);
  return cudaGetLastError();
}

template <class T>
cudaError_t gated_norm_backward_launch(const GatedNormArgs<T>& p, const GatedNormGradients<T>& g, float* shares,
                                       std::int64_t rows, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  const auto kernel = p.gate_first ? norm_backward_kernel<true, T> : norm_backward_kernel<false, T>;
  kernel<<<warp_blocks(rows * p.heads), kThreads, 0, stream>>>(p, g, shares, rows);
  return cudaGetLastError();
}

template <class T>
cudaError_t head_gate_forward_launch(const HeadGateArgs<T>& p, T* y, std::int64_t rows, cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  gate_forward_kernel<T><<<grid_for(rows * p.heads * p.D, kThreads), kThreads, 0, stream>>>(p, y, rows);
  return cudaGetLastError();
}

template <class T>
cudaError_t head_gate_backward_launch(const HeadGateArgs<T>& p, const T* dy, T* dx, T* dg, std::int64_t rows,
                                      cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  gate_backward_kernel<T><<<grid_for(rows * p.heads * p.D, kThreads), kThreads, 0, stream>>>(p, dy, dx, dg, rows);
  return cudaGetLastError();
}

template cudaError_t gated_norm_forward_launch(const GatedNormArgs<float>&, float*, std::int64_t, std::int64_t,
                                               cudaStream_t);
template cudaError_t gated_norm_forward_launch(const GatedNormArgs<bfloat16>&, bfloat16*, std::int64_t, std::int64_t,
                                               cudaStream_t);
template cudaError_t gated_norm_backward_launch(const GatedNormArgs<float>&, const GatedNormGradients<float>&, float*,
                                                std::int64_t, cudaStream_t);
template cudaError_t gated_norm_backward_launch(const GatedNormArgs<bfloat16>&, const GatedNormGradients<bfloat16>&,
                                                float*, std::int64_t, cudaStream_t);
template cudaError_t head_gate_forward_launch(const HeadGateArgs<float>&, float*, std::int64_t, cudaStream_t);
template cudaError_t head_gate_forward_launch(const HeadGateArgs<bfloat16>&, bfloat16*, std::int64_t, cudaStream_t);
template cudaError_t head_gate_backward_launch(const HeadGateArgs<float>&, const float*, float*, float*, std::int64_t,
                                               cudaStream_t);
template cudaError_t head_gate_backward_launch(const HeadGateArgs<bfloat16>&, const bfloat16*, bfloat16*, bfloat16*,
                                               std::int64_t, cudaStream_t);

}  // namespace nemo_rl::kernels
