// GAE on CUDA: one block a row, scanned from its end (kernels/gae_scan.h): eight tokens a thread, then lanes, then
// warps, then tiles of the row.
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/launchers.h"
#include "kernels/gae_scan.h"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 128;
constexpr int kPerThread = 8;
constexpr int kTileTokens = kThreads * kPerThread;
constexpr int kWarps = kThreads / kWarp;

__device__ __forceinline__ GaeRun shuffle_down(const GaeRun& r, int offset) {
  const unsigned all = 0xffffffffu;
  return {__shfl_down_sync(all, r.value, offset),        __shfl_down_sync(all, r.from_value, offset),
          __shfl_down_sync(all, r.offset, offset),       __shfl_down_sync(all, r.decay, offset),
          __shfl_down_sync(all, r.from_value_v, offset), __shfl_down_sync(all, r.offset_v, offset),
          __shfl_down_sync(all, r.decay_v, offset),      __shfl_down_sync(all, r.has_value, offset)};
}

template <class T>
struct RowTerms {
  double gamma, decay, decay_value, reward;
  std::int64_t last;  ///< last valid token of the row, -1 if none
};

template <class T>
__device__ RowTerms<T> row_terms(const GaeArgs<T>& a, const GaeConfig& c, std::int64_t b, double* shared) {
  double last = -1, length = 0;
  for (std::int64_t t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
    if (a.mask.row(b)[t] == T(0)) continue;
    last = static_cast<double>(t);
    length += 1;
  }
  last = block_reduce(RowMerge::max, last, shared);
  length = block_reduce(RowMerge::sum, length, shared);
  const double decay = c.gamma * gae_row_lambda(c, length);
  return {c.gamma, decay, c.decoupled ? c.gamma * c.lambda_value : decay, static_cast<double>(a.rewards[b]),
          static_cast<std::int64_t>(last)};
}

/// The map of token t; identity where it is masked or past the end.
template <class T>
__device__ __forceinline__ GaeRun token_run(const GaeArgs<T>& a, const GaeConfig& c, const RowTerms<T>& row,
                                            std::int64_t b, std::int64_t t, double& value) {
  value = 0;
  if (t >= a.num_tokens) return gae_identity();
  value = a.values.row(b)[t];
  if (a.mask.row(b)[t] == T(0)) return gae_identity();
  double reward = t == row.last ? row.reward : 0.0;
  if (c.kl_coef != 0)
    reward -= token_kl_penalty(c.kl_type, static_cast<T>(c.kl_coef), a.logprobs.row(b)[t], a.reference.row(b)[t]);
  return gae_token(reward, value, row.gamma, row.decay, row.decay_value);
}

/// The run of all threads to the right of this one (its own left out), and of the whole tile in `tile`.
__device__ GaeRun block_scan(const GaeRun& mine, GaeRun* warp_runs, GaeRun& tile) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  GaeRun inclusive = mine;  // this lane and all lanes right of it in the warp
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const GaeRun right = shuffle_down(inclusive, offset);
    if (lane + offset < kWarp) inclusive = gae_compose(inclusive, right);
  }
  if (lane == 0) warp_runs[warp] = inclusive;
  __syncthreads();
  GaeRun right_of_warp = gae_identity();
  tile = gae_identity();
  for (int w = kWarps - 1; w >= 0; --w) {
    if (w == warp) right_of_warp = tile;
    tile = gae_compose(warp_runs[w], tile);
  }
  const GaeRun next = shuffle_down(inclusive, 1);
  const GaeRun exclusive = lane == kWarp - 1 ? right_of_warp : gae_compose(next, right_of_warp);
  __syncthreads();  // before the next tile writes to `warp_runs`
  return exclusive;
}

template <class T>
__global__ void __launch_bounds__(kThreads) gae_kernel(GaeArgs<T> a, GaeConfig c) {
  __shared__ double shared[kMaxWarps];
  __shared__ GaeRun warp_runs[kWarps];
  const std::int64_t b = blockIdx.x;
  const RowTerms<T> row = row_terms(a, c, b, shared);
  GaeState carry = {0, 0, 0};
  const std::int64_t tiles = (a.num_tokens + kTileTokens - 1) / kTileTokens;
  for (std::int64_t tile = tiles - 1; tile >= 0; --tile) {
    const std::int64_t first = tile * kTileTokens + threadIdx.x * kPerThread;
    GaeRun runs[kPerThread], mine = gae_identity(), whole;
    double values[kPerThread];
    for (int i = kPerThread - 1; i >= 0; --i) {
      runs[i] = token_run(a, c, row, b, first + i, values[i]);
      mine = gae_compose(runs[i], mine);
    }
    GaeState state = gae_apply(block_scan(mine, warp_runs, whole), carry);
    for (int i = kPerThread - 1; i >= 0; --i) {
      state = gae_apply(runs[i], state);
      if (first + i >= a.num_tokens) continue;
      const std::int64_t at = b * a.num_tokens + first + i;
      a.advantages[at] = runs[i].has_value ? static_cast<T>(state.advantage) : T(0);
      a.returns[at] = static_cast<T>((c.decoupled ? state.value_advantage : state.advantage) + values[i]);
    }
    carry = gae_apply(whole, carry);
  }
}

}  // namespace

template <class T>
cudaError_t gae_launch(const GaeArgs<T>& args, const GaeConfig& config, cudaStream_t stream) {
  if (args.num_rows == 0) return cudaSuccess;
  gae_kernel<T><<<static_cast<unsigned>(args.num_rows), kThreads, 0, stream>>>(args, config);
  return cudaGetLastError();
}

template cudaError_t gae_launch(const GaeArgs<float>&, const GaeConfig&, cudaStream_t);
template cudaError_t gae_launch(const GaeArgs<double>&, const GaeConfig&, cudaStream_t);

}  // namespace nemo_rl::kernels
