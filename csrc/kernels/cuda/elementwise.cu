// Rotary embedding, gated activation and AdamW on CUDA: every thread does eight neighbouring values.
#include "kernels/cuda/model_launchers.h"
#include "kernels/cuda/vector_access.cuh"
#include "kernels/elementwise_math.h"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;

/// Eight pairs of a head from its pair i on: of neighbours, or `half` apart; n pairs are left.
template <bool Interleaved>
struct Pairs {
  std::int64_t half, n;
  bool vectors;
  template <class T>
  __device__ __forceinline__ void load(const T* x, std::int64_t i, float (&a)[kEight], float (&b)[kEight]) const {
    load8(x + (Interleaved ? 2 * i : i), Interleaved ? 2 * n : n, vectors, a);
    load8(x + (Interleaved ? 2 * i + kEight : i + half), Interleaved ? 2 * n - kEight : n, vectors, b);
    if constexpr (Interleaved) {
      float one[kEight], other[kEight];
#pragma unroll
      for (int k = 0; k < kEight; ++k) {
        one[k] = k < kEight / 2 ? a[2 * k % kEight] : b[2 * k % kEight];
        other[k] = k < kEight / 2 ? a[(2 * k + 1) % kEight] : b[(2 * k + 1) % kEight];
      }
#pragma unroll
      for (int k = 0; k < kEight; ++k) a[k] = one[k], b[k] = other[k];
    }
  }
  template <class T>
  __device__ __forceinline__ void store(T* x, std::int64_t i, const float (&a)[kEight],
                                        const float (&b)[kEight]) const {
    if constexpr (Interleaved) {
      float first[kEight], last[kEight];
#pragma unroll
      for (int k = 0; k < kEight; ++k) {
        first[k] = k % 2 == 0 ? a[k / 2] : b[k / 2];
        last[k] = k % 2 == 0 ? a[kEight / 2 + k / 2] : b[kEight / 2 + k / 2];
      }
      store8(x + 2 * i, 2 * n, vectors, first);
      store8(x + 2 * i + kEight, 2 * n - kEight, vectors, last);
    } else {
      store8(x + i, n, vectors, a);
      store8(x + i + half, n, vectors, b);
    }
  }
};

template <bool Interleaved, class T>
__global__ void __launch_bounds__(kThreads) rope_kernel(RopeArgs<T> p, std::int64_t tokens, bool vectors) {
  const std::int64_t half = p.rotary / 2, chunks = (half + kEight - 1) / kEight, items = tokens * p.heads * chunks;
  for (std::int64_t item = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; item < items;
       item += std::int64_t{kThreads} * gridDim.x) {
    const std::int64_t i = item % chunks * kEight, head = item / chunks % p.heads, t = item / chunks / p.heads,
                       n = half - i;
    T* const x = p.x + t * p.stride_x + head * p.H;
    const Pairs<Interleaved> pairs{half, n, vectors};
    float a[kEight], b[kEight], c[kEight], s[kEight];
    pairs.load(x, i, a, b);
    load8(p.cos + p.positions[t] * half + i, n, vectors, c);
    load8(p.sin + p.positions[t] * half + i, n, vectors, s);
#pragma unroll
    for (int k = 0; k < kEight; ++k) rope_rotate(a[k], b[k], c[k], p.inverse ? -s[k] : s[k], a[k], b[k]);
    pairs.store(x, i, a, b);
  }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }

/// sigmoid(z(x)) of kernels/swiglu.h.
template <Gate G>
__device__ __forceinline__ float gate_sigmoid(float x) {
  if constexpr (G == Gate::silu) return sigmoid(x);
  if constexpr (G == Gate::clamped) return sigmoid(x * static_cast<float>(kClampedSlope));
  return sigmoid(x * static_cast<float>(kGeluScale) * (x * x * static_cast<float>(kGeluCubic) + 1.0f));
}

constexpr float kLimit = static_cast<float>(kClampedLimit);

/// What f reads of a gate, and what multiplies f; a NaN stays one.
template <Gate G>
__device__ __forceinline__ float gate_value(float gate) {
  return G == Gate::clamped && gate > kLimit ? kLimit : gate;
}
template <Gate G>
__device__ __forceinline__ float up_factor(float up) {
  return G == Gate::clamped ? 1.0f + clamp_to(up, -kLimit, kLimit) : up;
}

template <Gate G, class T>
__global__ void __launch_bounds__(kThreads)
    swiglu_forward_kernel(const T* gate_up, T* act, std::int64_t I, std::int64_t tokens, bool vectors) {
  const std::int64_t chunks = (I + kEight - 1) / kEight, items = tokens * chunks;
  for (std::int64_t item = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; item < items;
       item += std::int64_t{kThreads} * gridDim.x) {
    const std::int64_t i = item % chunks * kEight, t = item / chunks, n = I - i;
    float g[kEight], u[kEight];
    load8(gate_up + t * 2 * I + i, n, vectors, g);
    load8(gate_up + t * 2 * I + I + i, n, vectors, u);
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      const float gate = gate_value<G>(g[k]);
      g[k] = gate * gate_sigmoid<G>(gate) * up_factor<G>(u[k]);
    }
    store8(act + t * I + i, n, vectors, g);
  }
}

/// d_gate_up may be gate_up: a thread reads its values before it writes them.
template <Gate G, class T>
__global__ void __launch_bounds__(kThreads) swiglu_backward_kernel(const T* d_act, const T* gate_up, T* d_gate_up,
                                                                   std::int64_t I, std::int64_t tokens, bool vectors) {
  const std::int64_t chunks = (I + kEight - 1) / kEight, items = tokens * chunks;
  for (std::int64_t item = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; item < items;
       item += std::int64_t{kThreads} * gridDim.x) {
    const std::int64_t i = item % chunks * kEight, t = item / chunks, n = I - i;
    float d[kEight], g[kEight], u[kEight];
    load8(d_act + t * I + i, n, vectors, d);
    load8(gate_up + t * 2 * I + i, n, vectors, g);
    load8(gate_up + t * 2 * I + I + i, n, vectors, u);
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      const float gate = gate_value<G>(g[k]), s = gate_sigmoid<G>(gate);
      float rest = gate * (1.0f - s), d_up = d[k] * gate * s;
      if constexpr (G == Gate::gelu_tanh)
        rest *= gate * gate * static_cast<float>(3 * kGeluCubic * kGeluScale) + static_cast<float>(kGeluScale);
      if constexpr (G == Gate::clamped) rest *= static_cast<float>(kClampedSlope);
      float d_gate = d[k] * up_factor<G>(u[k]) * s * (1.0f + rest);
      if constexpr (G == Gate::clamped) {  // no gradient where a value is held back
        if (g[k] > kLimit) d_gate = 0;
        if (u[k] > kLimit || u[k] < -kLimit) d_up = 0;
      }
      g[k] = d_gate;
      u[k] = d_up;
    }
    store8(d_gate_up + t * 2 * I + i, n, vectors, g);
    store8(d_gate_up + t * 2 * I + I + i, n, vectors, u);
  }
}

/// y = bias in every row, or y + bias.
template <class T, class O>
__global__ void __launch_bounds__(kThreads)
    bias_rows_kernel(const T* bias, O* y, std::int64_t stride, std::int64_t rows, std::int64_t N, bool accumulate) {
  const std::int64_t items = rows * N;
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < items;
       i += std::int64_t{kThreads} * gridDim.x) {
    O& to = y[i / N * stride + i % N];
    to = static_cast<O>(accumulate ? widen(to) + widen(bias[i % N]) : widen(bias[i % N]));
  }
}

template <class M, class V>
__global__ void __launch_bounds__(kThreads) adamw_kernel(AdamWArgs<float, M, V> p, std::int64_t n, bool vectors) {
  const AdamWConstants<float> c = adamw_constants(p);
  const std::int64_t chunks = (n + kEight - 1) / kEight;
  for (std::int64_t chunk = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; chunk < chunks;
       chunk += std::int64_t{kThreads} * gridDim.x) {
    const std::int64_t i = chunk * kEight, left = n - i;
    float g[kEight], w[kEight], m[kEight], v[kEight];
    load8(p.grads + i, left, vectors, g);
    if (p.remainders) {
#pragma unroll
      for (int k = 0; k < kEight; ++k) w[k] = k < left ? join_halves(p.compute[i + k], p.remainders[i + k]) : 0.0f;
    } else {
      load8(p.weights + i, left, vectors, w);
    }
    if constexpr (sizeof(M) > 1) {
      load8(p.exp_avg + i, left, vectors, m);
      load8(p.exp_avg_sq + i, left, vectors, v);
    }
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      const std::uint32_t draw = adamw_draw(p.first + i + k, p.step);
      if constexpr (sizeof(M) > 1) {
        adamw_update(c, g[k], w[k], m[k], v[k]);
        m[k] = widen(keep_moment<M>(m[k], draw & 0xffffu));
        v[k] = widen(keep_moment<V>(v[k], draw >> 16));
      } else if (k < left) {
        read_moments(p.exp_avg[i + k], p.exp_avg_sq[i + k], m[k], v[k]);
        adamw_update(c, g[k], w[k], m[k], v[k]);
        keep_moments(m[k], v[k], draw, p.exp_avg[i + k], p.exp_avg_sq[i + k]);
      }
    }
    if (p.remainders) {
#pragma unroll
      for (int k = 0; k < kEight; ++k)
        if (k < left) split_halves(w[k], p.compute[i + k], p.remainders[i + k]);
    } else {
      store8(p.weights + i, left, vectors, w);
    }
    if constexpr (sizeof(M) > 1) {
      store8(p.exp_avg + i, left, vectors, m);
      store8(p.exp_avg_sq + i, left, vectors, v);
    }
    if (p.compute && !p.remainders) store8(p.compute + i, left, vectors, w);
  }
}

}  // namespace

template <class T>
cudaError_t rope_launch(const RopeArgs<T>& p, std::int64_t tokens, cudaStream_t stream) {
  const std::int64_t half = p.rotary / 2, items = tokens * p.heads * ((half + kEight - 1) / kEight);
  if (items == 0) return cudaSuccess;
  const bool vectors = half % kEight == 0 && p.H % kEight == 0 && vectorizable(p.x, p.stride_x) &&
                       vectorizable(p.cos, half) && vectorizable(p.sin, half);
  const auto kernel = p.interleaved ? rope_kernel<true, T> : rope_kernel<false, T>;
  kernel<<<grid_for(items, kThreads), kThreads, 0, stream>>>(p, tokens, vectors);
  return cudaGetLastError();
}

template <class T>
cudaError_t swiglu_forward_launch(const T* gate_up, T* act, std::int64_t I, std::int64_t tokens, Gate gate,
                                  cudaStream_t stream) {
  const std::int64_t items = tokens * ((I + kEight - 1) / kEight);
  if (items == 0) return cudaSuccess;
  const bool vectors = vectorizable(gate_up, I) && vectorizable(act, I);
  const auto kernel = gate == Gate::silu      ? swiglu_forward_kernel<Gate::silu, T>
                      : gate == Gate::clamped ? swiglu_forward_kernel<Gate::clamped, T>
                                              : swiglu_forward_kernel<Gate::gelu_tanh, T>;
  kernel<<<grid_for(items, kThreads), kThreads, 0, stream>>>(gate_up, act, I, tokens, vectors);
  return cudaGetLastError();
}

template <class T>
cudaError_t swiglu_backward_launch(const T* d_act, const T* gate_up, T* d_gate_up, std::int64_t I, std::int64_t tokens,
                                   Gate gate, cudaStream_t stream) {
  const std::int64_t items = tokens * ((I + kEight - 1) / kEight);
  if (items == 0) return cudaSuccess;
  const bool vectors = vectorizable(d_act, I) && vectorizable(gate_up, I) && vectorizable(d_gate_up, I);
  const auto kernel = gate == Gate::silu      ? swiglu_backward_kernel<Gate::silu, T>
                      : gate == Gate::clamped ? swiglu_backward_kernel<Gate::clamped, T>
                                              : swiglu_backward_kernel<Gate::gelu_tanh, T>;
  kernel<<<grid_for(items, kThreads), kThreads, 0, stream>>>(d_act, gate_up, d_gate_up, I, tokens, vectors);
  return cudaGetLastError();
}

template <class T, class O>
cudaError_t bias_rows_launch(const T* bias, O* y, std::int64_t stride, std::int64_t rows, std::int64_t N,
                             bool accumulate, cudaStream_t stream) {
  if (rows * N == 0) return cudaSuccess;
  bias_rows_kernel<T, O><<<grid_for(rows * N, kThreads), kThreads, 0, stream>>>(bias, y, stride, rows, N, accumulate);
  return cudaGetLastError();
}

template <class M, class V>
cudaError_t adamw_launch(const AdamWArgs<float, M, V>& p, std::int64_t n, cudaStream_t stream) {
  if (n == 0) return cudaSuccess;
  const bool vectors = vectorizable(p.grads, 0) && vectorizable(p.weights, 0) && vectorizable(p.exp_avg, 0) &&
                       vectorizable(p.exp_avg_sq, 0) && (p.compute == nullptr || vectorizable(p.compute, 0));
  adamw_kernel<M, V><<<grid_for((n + kEight - 1) / kEight, kThreads), kThreads, 0, stream>>>(p, n, vectors);
  return cudaGetLastError();
}

template cudaError_t adamw_launch(const AdamWArgs<float, float, float>&, std::int64_t, cudaStream_t);
template cudaError_t adamw_launch(const AdamWArgs<float, bfloat16, float>&, std::int64_t, cudaStream_t);
template cudaError_t adamw_launch(const AdamWArgs<float, float, bfloat16>&, std::int64_t, cudaStream_t);
template cudaError_t adamw_launch(const AdamWArgs<float, bfloat16, bfloat16>&, std::int64_t, cudaStream_t);
template cudaError_t adamw_launch(const AdamWArgs<float, std::uint8_t, std::uint8_t>&, std::int64_t, cudaStream_t);

template cudaError_t bias_rows_launch(const float*, float*, std::int64_t, std::int64_t, std::int64_t, bool,
                                      cudaStream_t);
template cudaError_t bias_rows_launch(const bfloat16*, float*, std::int64_t, std::int64_t, std::int64_t, bool,
                                      cudaStream_t);
template cudaError_t bias_rows_launch(const bfloat16*, bfloat16*, std::int64_t, std::int64_t, std::int64_t, bool,
                                      cudaStream_t);
template cudaError_t rope_launch(const RopeArgs<float>&, std::int64_t, cudaStream_t);
template cudaError_t rope_launch(const RopeArgs<bfloat16>&, std::int64_t, cudaStream_t);
template cudaError_t swiglu_forward_launch(const float*, float*, std::int64_t, std::int64_t, Gate, cudaStream_t);
template cudaError_t swiglu_forward_launch(const bfloat16*, bfloat16*, std::int64_t, std::int64_t, Gate, cudaStream_t);
template cudaError_t swiglu_backward_launch(const float*, const float*, float*, std::int64_t, std::int64_t, Gate,
                                            cudaStream_t);
template cudaError_t swiglu_backward_launch(const bfloat16*, const bfloat16*, bfloat16*, std::int64_t, std::int64_t,
                                            Gate, cudaStream_t);

}  // namespace nemo_rl::kernels
