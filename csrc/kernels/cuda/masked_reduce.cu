// Whitening on CUDA: moments of each row by one block, one block merges the rows in order, then every token is scaled.
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/launchers.h"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) moments_kernel(MaskedArgs<T> a, Moments* rows) {
  __shared__ double shared[kMaxWarps];
  const std::int64_t b = blockIdx.x;
  const T* values = a.values + b * a.num_tokens;
  const T* mask = a.mask.row(b);
  double count = 0, sum = 0, square = 0;
  for (std::int64_t t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
    if (mask[t] == T(0)) continue;
    count += mask[t];
    sum += static_cast<double>(mask[t]) * values[t];
  }
  count = block_reduce(RowMerge::sum, count, shared);
  sum = block_reduce(RowMerge::sum, sum, shared);
  const double mean = count != 0 ? sum / count : 0.0;
  for (std::int64_t t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
    if (mask[t] == T(0)) continue;
    const double d = values[t] - mean;
    square += static_cast<double>(mask[t]) * d * d;
  }
  square = block_reduce(RowMerge::sum, square, shared);
  if (threadIdx.x == 0) rows[b] = {count, mean, square};
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const Moments* rows, std::int64_t num_rows, WhitenRule rule, WhitenScale* scale) {
  __shared__ Moments parts[kThreads];
  const std::int64_t each = (num_rows + kThreads - 1) / kThreads;
  const std::int64_t begin = threadIdx.x * each, end = begin + each < num_rows ? begin + each : num_rows;
  Moments all;
  for (std::int64_t b = begin; b < end; ++b) all = merge_moments(all, rows[b]);
  parts[threadIdx.x] = all;
  for (int width = kThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) parts[threadIdx.x] = merge_moments(parts[threadIdx.x], parts[threadIdx.x + width]);
  }
  if (threadIdx.x == 0) *scale = whiten_scale<T>(rule, parts[0]);
}

template <class T>
__global__ void whiten_kernel(MaskedArgs<T> a, const WhitenScale* scale, bool zero_masked) {
  const WhitenScale w = *scale;
  const std::int64_t b = blockIdx.x;
  const T* mask = a.mask.row(b);
  for (std::int64_t t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
    T& v = a.values[b * a.num_tokens + t];
    const bool zero = w.scale == 0 || (zero_masked && mask[t] == T(0));
    v = zero ? T(0) : static_cast<T>((static_cast<double>(v) - w.mean) * w.scale);
  }
}

template <class T>
__global__ void token_advantages_kernel(TokenAdvantageArgs<T> a) {
  const std::int64_t b = blockIdx.x;
  const T advantage = a.advantages[b], coef = static_cast<T>(a.kl_coef);
  for (std::int64_t t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
    const bool penalised = a.logprobs.data != nullptr && a.mask.row(b)[t] != T(0);
    const T penalty = penalised ? token_kl_penalty(a.kl_type, coef, a.logprobs.row(b)[t], a.reference.row(b)[t]) : T(0);
    a.out[b * a.num_tokens + t] = advantage - penalty;
  }
}

}  // namespace

template <class T>
cudaError_t whiten_launch(const MaskedArgs<T>& args, WhitenRule rule, bool zero_masked, Moments* rows,
                          WhitenScale* scale, cudaStream_t stream) {
  const unsigned blocks = static_cast<unsigned>(args.num_rows);
  if (blocks > 0) moments_kernel<T><<<blocks, kThreads, 0, stream>>>(args, rows);
  scale_kernel<T><<<1, kThreads, 0, stream>>>(rows, args.num_rows, rule, scale);
  if (blocks > 0) whiten_kernel<T><<<blocks, kThreads, 0, stream>>>(args, scale, zero_masked);
  return cudaGetLastError();
}

template <class T>
cudaError_t token_advantages_launch(const TokenAdvantageArgs<T>& args, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  token_advantages_kernel<T><<<static_cast<unsigned>(args.num_rows), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template cudaError_t whiten_launch(const MaskedArgs<float>&, WhitenRule, bool, Moments*, WhitenScale*, cudaStream_t);
template cudaError_t whiten_launch(const MaskedArgs<double>&, WhitenRule, bool, Moments*, WhitenScale*, cudaStream_t);
template cudaError_t token_advantages_launch(const TokenAdvantageArgs<float>&, cudaStream_t);
template cudaError_t token_advantages_launch(const TokenAdvantageArgs<double>&, cudaStream_t);

}  // namespace nemo_rl::kernels
