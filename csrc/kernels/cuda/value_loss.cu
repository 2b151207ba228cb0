// Value loss on CUDA: one block a row with the arithmetic of kernels/value_loss.h, then one block for the metrics.
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/launchers.h"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) rows_kernel(ValueLossArgs<T> a, ValueLossConfig c, double* rows) {
  __shared__ double shared[kMaxWarps];
  const std::int64_t b = blockIdx.x;
  const T sample = a.sample_mask[b], cliprange = static_cast<T>(c.cliprange);
  const T weight = static_cast<T>(0.5 * c.scale * reciprocal_count<T>(*a.global_valid_toks));
  double sum[kValueRowSize];
  for (int i = 0; i < kValueRowSize; ++i) sum[i] = merge_identity(value_loss_merge(i));
  for (std::int64_t t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
    const T mask = a.token_mask.row(b)[t] * sample;
    T grad = T(0);
    if (mask != T(0)) {
      const T v = a.values.row(b)[t], target = a.returns.row(b)[t];
      const ValueTerm<T> term = value_term(v, target, cliprange > T(0) ? a.old_values.row(b)[t] : T(0), cliprange);
      grad = mask * (term.slope * weight);
      const double m = mask, residual = target - v;
      sum[kSquares] += term.error * m;
      sum[kClipped] += term.clipped * m;
      sum[kReturns] += target * m;
      sum[kValues] += v * m;
      sum[kReturnsSquared] += static_cast<double>(target) * target * m;
      sum[kResidualSquared] += residual * residual * m;
      sum[kValueMin] = merge_rows(RowMerge::min, sum[kValueMin], v);
      sum[kValueMax] = merge_rows(RowMerge::max, sum[kValueMax], v);
      if (!(is_finite(term.error) && is_finite(grad)))
        sum[kFirstBadValue] = merge_rows(RowMerge::min, sum[kFirstBadValue], static_cast<double>(b * a.num_tokens + t));
    }
    a.grad[b * a.num_tokens + t] = grad;
  }
  for (int i = 0; i < kValueRowSize; ++i) sum[i] = block_reduce(value_loss_merge(i), sum[i], shared);
  if (threadIdx.x == 0)
    for (int i = 0; i < kValueRowSize; ++i) rows[b * kValueRowSize + i] = sum[i];
}

template <class T>
__global__ void metrics_kernel(const double* rows, std::int64_t num_rows, std::int64_t num_tokens, ValueLossConfig c,
                               const double* toks, double* metrics) {
  __shared__ double merged[kValueRowSize];
  const int column = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const RowMerge how = value_loss_merge(column);
  double v = merge_identity(how);
  for (std::int64_t b = lane; b < num_rows; b += kWarp) v = merge_rows(how, v, rows[b * kValueRowSize + column]);
  v = warp_reduce(how, v);
  if (lane == 0) merged[column] = v;
  __syncthreads();
  if (threadIdx.x == 0) value_loss_finalize<T>(merged, num_tokens, c, *toks, metrics);
}

}  // namespace

template <class T>
cudaError_t value_loss_launch(const ValueLossArgs<T>& args, const ValueLossConfig& config, double* rows,
                              double* metrics, cudaStream_t stream) {
  if (args.num_rows > 0)
    rows_kernel<T><<<static_cast<unsigned>(args.num_rows), kThreads, 0, stream>>>(args, config, rows);
  metrics_kernel<T><<<1, kValueRowSize * kWarp, 0, stream>>>(rows, args.num_rows, args.num_tokens, config,
                                                             args.global_valid_toks, metrics);
  return cudaGetLastError();
}

template cudaError_t value_loss_launch(const ValueLossArgs<float>&, const ValueLossConfig&, double*, double*,
                                       cudaStream_t);
template cudaError_t value_loss_launch(const ValueLossArgs<double>&, const ValueLossConfig&, double*, double*,
                                       cudaStream_t);

}  // namespace nemo_rl::kernels
