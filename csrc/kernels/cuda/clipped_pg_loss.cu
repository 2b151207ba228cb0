// Clipped policy-gradient loss on CUDA: one block a row, the per-token arithmetic of kernels/clipped_pg_loss.h, sums in
// double in a fixed order; a second block merges the rows into the metrics.
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/launchers.h"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;

/// What is known of a row before its tokens are visited; see the CPU kernel of the same op.
template <class T>
struct Row {
  T sample, grad_weight, inverse_length, ratio, importance, kept, nll_weight;
  double weight;
  RowWeights<T> vespo;
};

template <class T>
struct Token {
  T x, prev, gen, adv, mask, penalty;
};

template <class T>
__device__ __forceinline__ Token<T> load_token(const ClippedPGArgs<T>& a, RatioMode mode, std::int64_t b,
                                               std::int64_t t, T mask) {
  const T x = a.curr.row(b)[t];
  const T prev = mode == RatioMode::on_policy ? x : a.prev.row(b)[t];
  const T penalty = mode == RatioMode::kl_cov ? a.penalty.row(b)[t] : T(0);
  return {x, prev, a.generation.row(b)[t], a.advantages.row(b)[t], mask, penalty};
}

/// What a token adds to its row's log ratio.
template <class T>
__device__ __forceinline__ T log_ratio_of(const ClippedPGConfig& c, const Token<T>& k) {
  if (c.ratio_mode == RatioMode::gmpo) return clipped_log_ratio(c, k.x, k.prev, k.adv).value;
  return c.ratio_mode == RatioMode::vespo ? vespo_log_ratio(c, k.x, k.prev, k.gen) : k.x - k.prev;
}

template <class T>
__device__ Row<T> prepare_row(const ClippedPGArgs<T>& a, const ClippedPGConfig& c, const LossWeights& w, std::int64_t b,
                              T sample, double* shared) {
  Row<T> row = {sample, T(0), T(0), T(1), T(1), T(1), T(0), 1.0, {T(1), T(1)}};
  if (a.rewards && c.positive_nll_weight > 0 && a.rewards[b] > T(0))
    row.nll_weight = static_cast<T>(c.positive_nll_weight * w.positive_token);
  if (needs_row_pass(c)) {
    double length = 0, ratio = 0, importance = 0, finite_importance = 0;
    for (std::int64_t t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
      const T mask = a.token_mask.row(b)[t];
      if (mask == T(0)) continue;
      const Token<T> k = load_token(a, c.ratio_mode, b, t, mask);
      length += mask;
      ratio += static_cast<double>(log_ratio_of(c, k)) * mask;
      importance += static_cast<double>(k.prev - k.gen) * mask;
      finite_importance += static_cast<double>(finite_or_zero(k.prev - k.gen)) * mask;
    }
    length = block_reduce(RowMerge::sum, length, shared);
    ratio = block_reduce(RowMerge::sum, ratio, shared);
    importance = block_reduce(RowMerge::sum, importance, shared);
    finite_importance = block_reduce(RowMerge::sum, finite_importance, shared);
    const double denominator = static_cast<T>(length) + static_cast<T>(1e-8);
    row.inverse_length = static_cast<T>(1.0 / denominator);
    if (!c.token_level_loss)
      row.weight = c.fixed_length > 0 ? static_cast<T>(1.0 / c.fixed_length) : row.inverse_length;
    if (c.ratio_mode == RatioMode::vespo) {
      row.vespo = vespo_weights<T>(c, ratio);
    } else if (c.sequence_level_ratios) {
      row.ratio = exp_of(static_cast<T>(ratio / denominator));
    }
    if (row_importance(c)) row.importance = importance_of_row(c, importance, denominator, sample);
    if (c.importance_sampling == ImportanceSampling::seq_mask_tis) {
      const T mean = exp_of(static_cast<T>(finite_importance / denominator));
      row.kept = mean >= static_cast<T>(c.importance_min) && mean <= static_cast<T>(c.importance_max) ? T(1) : T(0);
    }
  }
  row.grad_weight = static_cast<T>(row.weight * (c.token_level_loss ? w.token : w.sequence));
  return row;
}

template <class T>
__device__ __forceinline__ PolicyTerm<T> row_policy_term(const ClippedPGConfig& c, const Row<T>& row,
                                                         const Token<T>& k) {
  const T lo = static_cast<T>(1.0 - c.ratio_clip_min), hi = static_cast<T>(1.0 + c.ratio_clip_max);
  if (grouped_ratio(c)) return grouped_term(c, k.adv, row.ratio, lo, hi);
  return token_term(c, k.x, k.prev, k.adv, lo, hi, row.vespo, k.penalty);
}

template <class T>
__device__ __forceinline__ KlTerm<T> row_kl_term(const ClippedPGArgs<T>& a, const ClippedPGConfig& c, const Token<T>& k,
                                                 std::int64_t b, std::int64_t t) {
  const T u = a.unfiltered.data ? a.unfiltered.row(b)[t] : k.x;
  const T weight = finite_or_zero(c.use_on_policy_kl_approximation ? exp_of(u - k.gen) : T(1) + (u - u));
  return kl_term(c.kl_type, u, a.reference.row(b)[t], weight, static_cast<T>(c.kl_input_clamp),
                 static_cast<T>(c.kl_output_clamp));
}

/// One valid token: its terms into the thread's sums and its gradient into the row (GSPO's actor part follows later).
template <class T>
__device__ void visit_token(const ClippedPGArgs<T>& a, const ClippedPGConfig& c, const Row<T>& row, const Token<T>& k,
                            std::int64_t b, std::int64_t t, double* sum, double& slope_sum) {
  const PolicyTerm<T> p = row_policy_term(c, row, k);
  const MismatchTerm<T> m = mismatch_term(c.kl_type, k.prev, k.gen);
  const T raw = row_importance(c) ? row.importance : m.importance;
  TruncatedWeight<T> w = truncate_importance(c.importance_sampling, raw, static_cast<T>(c.importance_min),
                                             static_cast<T>(c.importance_max));
  w.weight *= row.kept;
  const T loss = corrected(c) ? p.loss * w.weight : p.loss;
  const T slope = !corrected(c) || p.grad == T(0) ? p.grad : p.grad * w.weight;
  const T mult = k.mask == T(1) ? m.mult_prob_error : exp_of(abs_of(k.prev - k.gen) * k.mask);
  const double mask = k.mask;
  sum[kActor] += static_cast<double>(loss) * mask;
  sum[kRatio] += static_cast<double>(p.ratio) * mask;
  sum[kRatioClamped] += static_cast<double>(p.clamped) * mask;
  sum[kMultProbError] += static_cast<double>(mult) * mask;
  sum[kGenKl] += static_cast<double>(m.gen_kl) * mask;
  sum[kPolicyKl] += static_cast<double>(m.policy_kl) * mask;
  sum[kJs] += static_cast<double>(m.js) * mask;
  sum[kImportance] += static_cast<double>(w.weight) * mask;
  sum[kEntropy] += static_cast<double>(exp_of(k.x - k.gen) * k.x) * mask;
  sum[kOutOfBounds] += static_cast<double>(w.out_of_bounds) * mask;
  for (int i = kRatioMin; i <= kRatioMax; ++i) sum[i] = merge_rows(clipped_pg_merge(i), sum[i], p.ratio);
  for (int i = kClampedMin; i <= kClampedMax; ++i) sum[i] = merge_rows(clipped_pg_merge(i), sum[i], p.clamped);
  if (row.nll_weight != T(0)) sum[kNll] -= static_cast<double>(k.x) * mask;
  T grad = (grouped_ratio(c) ? T(0) : slope * row.grad_weight) - row.nll_weight;
  if (grouped_ratio(c)) slope_sum += static_cast<double>(slope) * mask;
  bool finite = is_finite(loss) && is_finite(slope) && is_finite(k.x);
  if (c.kl_penalty != 0) {
    const KlTerm<T> kl = row_kl_term(a, c, k, b, t);
    const T kl_grad = kl.d_logprob * static_cast<T>(row.grad_weight * c.kl_penalty);
    sum[kKl] += static_cast<double>(kl.value) * mask;
    finite = finite && is_finite(kl.value) && is_finite(kl.d_logprob);
    if (a.grad_unfiltered) a.grad_unfiltered[b * a.num_tokens + t] = k.mask * kl_grad;
    else grad += kl_grad;
  }
  a.grad[b * a.num_tokens + t] = k.mask * grad;
  if (!finite) sum[kFirstBad] = merge_rows(RowMerge::min, sum[kFirstBad], static_cast<double>(b * a.num_tokens + t));
}

template <class T>
__global__ void __launch_bounds__(kThreads) rows_kernel(ClippedPGArgs<T> a, ClippedPGConfig c, double* rows) {
  __shared__ double shared[kMaxWarps];
  const std::int64_t b = blockIdx.x;
  const LossWeights w = loss_weights<T>(a.counts);
  const T sample = a.sample_mask[b];
  double sum[kPGRowSize];
  for (int i = 0; i < kPGRowSize; ++i) sum[i] = merge_identity(clipped_pg_merge(i));
  double slope_sum = 0;
  Row<T> row = {};
  row.weight = 1.0;
  if (sample != T(0)) row = prepare_row(a, c, w, b, sample, shared);
  for (std::int64_t t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
    const T mask = a.token_mask.row(b)[t] * sample;
    if (mask != T(0)) {
      visit_token(a, c, row, load_token(a, c.ratio_mode, b, t, mask), b, t, sum, slope_sum);
    } else {
      a.grad[b * a.num_tokens + t] = T(0);
      if (a.grad_unfiltered) a.grad_unfiltered[b * a.num_tokens + t] = T(0);
    }
  }
  for (int i = 0; i < kPGRowSize; ++i) sum[i] = block_reduce(clipped_pg_merge(i), sum[i], shared);
  if (grouped_ratio(c) && sample != T(0)) {
    const T slope =
        static_cast<T>(block_reduce(RowMerge::sum, slope_sum, shared) * row.grad_weight * row.inverse_length);
    for (std::int64_t t = threadIdx.x; t < a.num_tokens; t += blockDim.x) {
      const T mask = a.token_mask.row(b)[t];
      if (mask == T(0)) continue;
      const Token<T> k = load_token(a, c.ratio_mode, b, t, mask);
      const bool open = c.ratio_mode != RatioMode::gmpo || clipped_log_ratio(c, k.x, k.prev, k.adv).slope != T(0);
      if (open) a.grad[b * a.num_tokens + t] += mask * slope;
    }
    const bool by_ratio = !is_finite(row.ratio) && sum[kFirstBad] < HUGE_VAL;
    if (threadIdx.x == 0 && (by_ratio || (!is_finite(slope) && !(sum[kFirstBad] < HUGE_VAL)))) {
      const std::int64_t t = first_bad_ratio(a.curr.row(b), a.prev.row(b), a.token_mask.row(b), a.num_tokens);
      sum[kFirstBad] = static_cast<double>(b * a.num_tokens + t);
    }
  }
  if (threadIdx.x != 0) return;
  sum[kActor] *= row.weight;
  sum[kKl] *= row.weight;
  sum[kValidSamples] = sample;
  if (row_importance(c) && sample != T(0))
    sum[kImportance] =
        static_cast<double>(truncate_importance(c.importance_sampling, row.importance, static_cast<T>(c.importance_min),
                                                static_cast<T>(c.importance_max))
                                .weight *
                            row.kept) *
        sample;
  if (c.importance_sampling == ImportanceSampling::seq_mask_tis && sample != T(0))
    sum[kOutOfBounds] = (1.0 - row.kept) * sample;
  for (int i = 0; i < kPGRowSize; ++i) rows[b * kPGRowSize + i] = sum[i];
}

/// One block: warp i merges column i, thread 0 writes the metrics.
template <class T>
__global__ void metrics_kernel(const double* rows, std::int64_t num_rows, std::int64_t num_tokens, ClippedPGConfig c,
                               const double* counts, double* metrics) {
  __shared__ double merged[kPGRowSize];
  const int column = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const RowMerge how = clipped_pg_merge(column);
  double v = merge_identity(how);
  for (std::int64_t b = lane; b < num_rows; b += kWarp) v = merge_rows(how, v, rows[b * kPGRowSize + column]);
  v = warp_reduce(how, v);
  if (lane == 0) merged[column] = v;
  __syncthreads();
  if (threadIdx.x == 0) clipped_pg_finalize(merged, num_tokens, c, loss_weights<T>(counts), metrics);
}

}  // namespace

template <class T>
cudaError_t clipped_pg_loss_launch(const ClippedPGArgs<T>& args, const ClippedPGConfig& config, double* rows,
                                   double* metrics, cudaStream_t stream) {
  if (args.num_rows > 0)
    rows_kernel<T><<<static_cast<unsigned>(args.num_rows), kThreads, 0, stream>>>(args, config, rows);
  metrics_kernel<T>
      <<<1, kPGRowSize * kWarp, 0, stream>>>(rows, args.num_rows, args.num_tokens, config, args.counts, metrics);
  return cudaGetLastError();
}

template cudaError_t clipped_pg_loss_launch(const ClippedPGArgs<float>&, const ClippedPGConfig&, double*, double*,
                                            cudaStream_t);
template cudaError_t clipped_pg_loss_launch(const ClippedPGArgs<double>&, const ClippedPGConfig&, double*, double*,
                                            cudaStream_t);

}  // namespace nemo_rl::kernels
