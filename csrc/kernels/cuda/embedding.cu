// Token embedding on CUDA, and its gradient: one block a row of the table, which adds its tokens in their order, so
// that no two threads ever add to one number.
#include "kernels/cuda/model_launchers.h"
#include "kernels/cuda/vector_access.cuh"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(const T* table, const std::int64_t* ids, float* h, std::int64_t D, bool vectors) {
  const std::int64_t t = blockIdx.x;
  const T* const from = table + ids[t] * D;
  for (std::int64_t d = threadIdx.x * std::int64_t{kEight}; d < D; d += kThreads * kEight) {
    float v[kEight];
    load8(from + d, D - d, vectors, v);
    store8(h + t * D + d, D - d, vectors, v);
  }
}

__global__ void __launch_bounds__(kThreads) backward_kernel(EmbeddingBackwardArgs p, bool vectors) {
  const std::int64_t u = blockIdx.x, d = (blockIdx.y * std::int64_t{kThreads} + threadIdx.x) * kEight, n = p.D - d;
  if (n <= 0) return;
  float* const to = p.d_table + p.rows[u] * p.D + d;
  float sum[kEight];
  load8(to, n, vectors, sum);
  for (std::int64_t i = p.first[u]; i < p.first[u + 1]; ++i) {
    float v[kEight];
    load8(p.dh + p.tokens[i] * p.D + d, n, vectors, v);
#pragma unroll
    for (int k = 0; k < kEight; ++k) sum[k] += v[k];
  }
  store8(to, n, vectors, sum);
}

}  // namespace

template <class T>
cudaError_t embedding_forward_launch(const T* table, const std::int64_t* ids, float* h, std::int64_t tokens,
                                     std::int64_t D, cudaStream_t stream) {
  if (tokens == 0 || D == 0) return cudaSuccess;
  forward_kernel<T><<<static_cast<unsigned>(tokens), kThreads, 0, stream>>>(
      table, ids, h, D, vectorizable(table, D) && vectorizable(h, D));
  return cudaGetLastError();
}

cudaError_t embedding_backward_launch(const EmbeddingBackwardArgs& p, cudaStream_t stream) {
  if (p.num_rows == 0 || p.D == 0) return cudaSuccess;
  const dim3 grid(static_cast<unsigned>(p.num_rows),
                  static_cast<unsigned>((p.D + kThreads * kEight - 1) / (kThreads * kEight)));
  backward_kernel<<<grid, kThreads, 0, stream>>>(p, vectorizable(p.dh, p.D) && vectorizable(p.d_table, p.D));
  return cudaGetLastError();
}

template cudaError_t embedding_forward_launch(const float*, const std::int64_t*, float*, std::int64_t, std::int64_t,
                                              cudaStream_t);
template cudaError_t embedding_forward_launch(const bfloat16*, const std::int64_t*, float*, std::int64_t, std::int64_t,
                                              cudaStream_t);

}  // namespace nemo_rl::kernels
