// Tokens, log-probabilities and their gradients from rows of logits on CUDA, a thread block a row.
#include "kernels/cuda/row_distribution.cuh"
#include "kernels/cuda/sampling_launchers.h"

namespace nemo_rl::kernels {
namespace {

/// A row under a rule: without its filter, and with it.
struct Filtered {
  bool filters, fit;  ///< fit: the row is finite
  RowThreshold kept;
  LogSumExp all, lse;  ///< lse: of the kept tokens
};

template <bool Entropy>
__device__ Filtered filtered_row(const Row& row, const SamplingRule& rule, RowScratch& scratch) {
  Filtered f;
  f.filters = rule.top_p < 1 || (rule.top_k > 0 && rule.top_k < row.V);
  f.all = f.lse = row_log_sum_exp<Entropy>(row, f.kept, scratch);
  f.fit = finite(f.all);
  if (!f.filters || rule.greedy || !f.fit) return f;
  f.kept = row_threshold(row, f.all, rule.top_p, rule.top_k, scratch);
  f.lse = row_log_sum_exp<Entropy>(row, f.kept, scratch);
  f.fit = finite(f.lse);
  return f;
}

template <bool Entropy>
__global__ void __launch_bounds__(kRowThreads)
    sample_kernel(const float* logits, std::int64_t V, const CudaDraw* draws, SampledToken* out) {
  __shared__ RowScratch scratch;
  const CudaDraw draw = draws[blockIdx.x];
  const Row row{logits + draw.logits_row * V, V, 1.0f / (draw.rule.greedy ? 1.0f : draw.rule.temperature)};
  const Filtered f = filtered_row<Entropy>(row, draw.rule, scratch);
  SampledToken result;
  result.logprob = -INFINITY;
  if (f.fit) {
    result.token =
        draw.rule.greedy ? row_argmax(row, f.all.max, scratch) : row_draw(row, f.lse, f.kept, draw.uniform, scratch);
    if (result.token >= 0 && result.token < V) result.logprob = row_logprob(row.z(result.token), f.lse);
    result.entropy = f.lse.entropy;
  }
  if (threadIdx.x == 0) out[blockIdx.x] = result;
}

__global__ void __launch_bounds__(kRowThreads)
    score_kernel(PairRows p, float* logprobs, float* unfiltered, float* entropy) {
  __shared__ RowScratch scratch;
  const std::int64_t r = blockIdx.x;
  const Row row{p.logits + r * p.V, p.V, 1.0f / p.rule.temperature};
  const Filtered f =
      entropy != nullptr ? filtered_row<true>(row, p.rule, scratch) : filtered_row<false>(row, p.rule, scratch);
  for (std::int64_t i = p.first[r] + threadIdx.x; i < p.first[r + 1]; i += kRowThreads) {
    const float z = row.z(p.targets[i]);
    logprobs[i] = !f.fit ? NAN : (f.kept.keeps(z, p.targets[i]) ? row_logprob(z, f.lse) : -INFINITY);
    if (unfiltered != nullptr) unfiltered[i] = finite(f.all) ? row_logprob(z, f.all) : NAN;
  }
  if (entropy != nullptr && threadIdx.x == 0) entropy[r] = f.lse.entropy;
}

/// Sum of g over the row's pairs that count: with `target` >= 0 only those with this target.
__device__ float sum_of_pairs(const PairRows& p, const Row& row, const float* g, std::int64_t r, std::int64_t target,
                              const RowThreshold& kept) {
  float sum = 0;
  for (std::int64_t i = p.first[r]; i < p.first[r + 1]; ++i)
    if ((target < 0 || p.targets[i] == target) && kept.keeps(row.z(p.targets[i]), p.targets[i])) sum += g[i];
  return sum;
}

template <class O>
__global__ void __launch_bounds__(kRowThreads)
    gradient_kernel(PairRows p, const float* g, const float* g_unfiltered, O* d_logits) {
  __shared__ RowScratch scratch;
  const std::int64_t r = blockIdx.x;
  const Row row{p.logits + r * p.V, p.V, 1.0f / p.rule.temperature};
  const Filtered f = filtered_row<false>(row, p.rule, scratch);
  const RowThreshold everything;
  const float total = sum_of_pairs(p, row, g, r, -1, f.kept);
  const float total_unfiltered = g_unfiltered != nullptr ? sum_of_pairs(p, row, g_unfiltered, r, -1, everything) : 0.0f;
  // own, own_unfiltered: the shares of pairs whose target v is
  const auto value = [&](std::int64_t v, float own, float own_unfiltered) {
    const float z = row.z(v);
    float sum = f.kept.keeps(z, v) ? own - total * expf(row_logprob(z, f.lse)) : 0.0f;
    if (g_unfiltered != nullptr) sum += own_unfiltered - total_unfiltered * expf(row_logprob(z, f.all));
    return sum * row.inverse;
  };
  O* const out = d_logits + r * p.V;
  for (std::int64_t v = threadIdx.x; v < p.V; v += kRowThreads) out[v] = static_cast<O>(value(v, 0.0f, 0.0f));
  __syncthreads();
  for (std::int64_t i = p.first[r] + threadIdx.x; i < p.first[r + 1]; i += kRowThreads) {
    const std::int64_t v = p.targets[i];
    bool leads = true;  // the first pair with this target: the entry is rounded once
    for (std::int64_t j = p.first[r]; j < i; ++j) leads = leads && p.targets[j] != v;
    if (leads)
      out[v] =
          static_cast<O>(value(v, sum_of_pairs(p, row, g, r, v, f.kept),
                               g_unfiltered != nullptr ? sum_of_pairs(p, row, g_unfiltered, r, v, everything) : 0.0f));
  }
}

}  // namespace

cudaError_t sample_rows_launch(const float* logits, std::int64_t V, const CudaDraw* draws, std::int64_t num_draws,
                               bool with_entropy, SampledToken* out, cudaStream_t stream) {
  if (num_draws == 0) return cudaSuccess;
  const auto grid = static_cast<unsigned>(num_draws);
  if (with_entropy) {
    sample_kernel<true><<<grid, kRowThreads, 0, stream>>>(logits, V, draws, out);
  } else {
    sample_kernel<false><<<grid, kRowThreads, 0, stream>>>(logits, V, draws, out);
  }
  return cudaGetLastError();
}

cudaError_t score_pairs_launch(const PairRows& args, float* logprobs, float* unfiltered, float* entropy,
                               cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  score_kernel<<<static_cast<unsigned>(args.rows), kRowThreads, 0, stream>>>(args, logprobs, unfiltered, entropy);
  return cudaGetLastError();
}

template <class O>
cudaError_t pairs_gradient_launch(const PairRows& args, const float* g, const float* g_unfiltered, O* d_logits,
                                  cudaStream_t stream) {
  if (args.rows == 0) return cudaSuccess;
  gradient_kernel<O><<<static_cast<unsigned>(args.rows), kRowThreads, 0, stream>>>(args, g, g_unfiltered, d_logits);
  return cudaGetLastError();
}

template cudaError_t pairs_gradient_launch(const PairRows&, const float*, const float*, float*, cudaStream_t);
template cudaError_t pairs_gradient_launch(const PairRows&, const float*, const float*, bfloat16*, cudaStream_t);

}  // namespace nemo_rl::kernels
