// A mixture of experts on CUDA, but for its products: a thread routes a token by the code that the CPU runs, and sums
// have the CPU's order.
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/expert_launchers.h"
#include "kernels/cuda/vector_access.cuh"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kRouteThreads = 64;  // few tokens still reach many multiprocessors
constexpr int kRowsOfWarp = kWarp / static_cast<int>(kRowProductChains);

/// f(t) for every token, a thread each.
template <class F>
__device__ __forceinline__ void for_tokens(std::int64_t tokens, const F& f) {
  for (std::int64_t t = blockIdx.x * std::int64_t{kRouteThreads} + threadIdx.x; t < tokens;
       t += std::int64_t{kRouteThreads} * gridDim.x)
    f(t);
}

template <bool Sigmoid>
__global__ void __launch_bounds__(kRouteThreads)
    route_kernel(CudaRoutes p, std::int64_t tokens, SigmoidRouter router, bool renormalise) {
  for_tokens(tokens, [&](std::int64_t t) {
    if constexpr (Sigmoid) route_token_by_sigmoid(p, t, router);
    else route_token(p, t, renormalise);
  });
}

template <bool Sigmoid>
__global__ void __launch_bounds__(kRouteThreads)
    route_backward_kernel(CudaRoutes p, std::int64_t tokens, SigmoidRouter router, bool renormalise,
                          const float* d_weight, float* d_logits) {
  for_tokens(tokens, [&](std::int64_t t) {
    if constexpr (Sigmoid) route_token_by_sigmoid_backward(p, t, router, d_weight, d_logits);
    else route_token_backward(p, t, renormalise, d_weight, d_logits);
  });
}

/// A thread a number of y, whose terms it adds in the order in which the router has chosen the experts.
__global__ void __launch_bounds__(kThreads) add_up_kernel(AddUpArgs p) {
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < p.T * p.D;
       i += std::int64_t{kThreads} * gridDim.x) {
    const std::int64_t t = i / p.D, d = i % p.D;
    float sum = 0;
    for (std::int64_t j = 0; j < p.k; ++j) {
      const std::int64_t pair = t * p.k + j, r = p.row == nullptr ? pair : p.row[pair];
      const float term = __fmul_rn(p.weight == nullptr ? 1.0f : p.weight[pair], p.rows[r * p.D + d]);
      sum = j == 0 ? term : __fadd_rn(sum, term);
    }
    p.y[i] = p.accumulate ? __fadd_rn(p.y[i], sum) : sum;
  }
}

/// A chain a lane; the chains of a row are added in ascending order.
template <class T>
__global__ void __launch_bounds__(kThreads)
    row_products_kernel(const T* a, const T* b, float* out, std::int64_t rows, std::int64_t columns) {
  constexpr int kChains = static_cast<int>(kRowProductChains);
  const std::int64_t first = (blockIdx.x * std::int64_t{kThreads} + threadIdx.x) / kWarp * kRowsOfWarp;
  const std::int64_t step = std::int64_t{kThreads} * gridDim.x / kWarp * kRowsOfWarp;
  const int lane = static_cast<int>(threadIdx.x % kWarp), chain = lane % kChains;
  for (std::int64_t begin = first; begin < rows; begin += step) {  // the whole warp
    const std::int64_t r = begin + lane / kChains;
    float part = 0;
    for (std::int64_t c = chain; r < rows && c < columns; c += kChains)
      part = __fadd_rn(part, __fmul_rn(widen(a[r * columns + c]), widen(b[r * columns + c])));
    float sum = 0;
    for (int i = 0; i < kChains; ++i) sum = __fadd_rn(sum, __shfl_sync(0xffffffffu, part, i, kChains));
    if (r < rows && chain == 0) out[r] = sum;
  }
}

}  // namespace

cudaError_t route_tokens_launch(const CudaRoutes& p, std::int64_t tokens, const SigmoidRouter* router, bool renormalise,
                                cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  const auto kernel = router != nullptr ? route_kernel<true> : route_kernel<false>;
  kernel<<<grid_for(tokens, kRouteThreads), kRouteThreads, 0, stream>>>(
      p, tokens, router != nullptr ? *router : SigmoidRouter{}, renormalise);
  return cudaGetLastError();
}

cudaError_t route_tokens_backward_launch(const CudaRoutes& p, std::int64_t tokens, const SigmoidRouter* router,
                                         bool renormalise, const float* d_weight, float* d_logits,
                                         cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  const auto kernel = router != nullptr ? route_backward_kernel<true> : route_backward_kernel<false>;
  kernel<<<grid_for(tokens, kRouteThreads), kRouteThreads, 0, stream>>>(
      p, tokens, router != nullptr ? *router : SigmoidRouter{}, renormalise, d_weight, d_logits);
  return cudaGetLastError();
}

cudaError_t add_up_experts_launch(const AddUpArgs& p, cudaStream_t stream) {
  if (p.T * p.D == 0) return cudaSuccess;
  add_up_kernel<<<grid_for(p.T * p.D, kThreads), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <class T>
cudaError_t row_products_launch(const T* a, const T* b, float* out, std::int64_t rows, std::int64_t columns,
                                cudaStream_t stream) {
  if (rows == 0) return cudaSuccess;
  row_products_kernel<T>
      <<<grid_for(rows * kRowProductChains, kThreads), kThreads, 0, stream>>>(a, b, out, rows, columns);
  return cudaGetLastError();
}

template cudaError_t row_products_launch(const float*, const float*, float*, std::int64_t, std::int64_t, cudaStream_t);
template cudaError_t row_products_launch(const bfloat16*, const bfloat16*, float*, std::int64_t, std::int64_t,
                                         cudaStream_t);

}  // namespace nemo_rl::kernels
