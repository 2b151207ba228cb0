// Sampling and scoring of many rows of logits; the arithmetic is kernels/sampling.h's.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels/sampling.h"
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

using kernels::SampledToken;
using kernels::SamplingRule;

/// One token to draw from row `logits_row`; several may draw from one row.
struct RowDraw {
  std::int64_t logits_row = 0;
  SamplingRule rule;
  double uniform = 0;  ///< in [0, 1)
};

/// Scratch for a vocabulary of V, kept by the calling thread from call to call.
kernels::FilterScratch thread_filter_scratch(std::int64_t V);

/// Throws ValueError on a temperature <= 0 or a top_p outside (0, 1].
void check_rule(const SamplingRule& rule);

/// logits [R, V], float32. Tokens of the result are -1 where the row is not finite. Every draw is independent of the
/// others and of the number of threads.
std::vector<SampledToken> sample_rows(const at::Tensor& logits, const std::vector<RowDraw>& draws, bool with_entropy);

/// Scores token_ids [R] (int64) under `rule`: what sample_rows would have reported had it drawn them.
std::vector<SampledToken> score_rows(const at::Tensor& logits, const at::Tensor& token_ids, const SamplingRule& rule,
                                     bool with_entropy);

/// Which log-probabilities are wanted of rows of logits: pair i, first[r] <= i < first[r + 1], asks for token
/// targets[i] after row r. Both tensors are int64 on the logits' device.
struct PairQuery {
  at::Tensor first;    ///< [R + 1]
  at::Tensor targets;  ///< of all pairs
  SamplingRule rule;   ///< not greedy
};

/// On CUDA: logits [R, V] float32. logprobs (and unfiltered, where defined) [pairs of all rows] get the entries of
/// these rows' pairs: what sample_rows would have reported under `rule`, and the same without top-k and top-p. entropy
/// [R], where defined, under `rule`. -inf where the filter removes a token, NaN where a row is not finite.
void score_pairs(const at::Tensor& logits, const PairQuery& query, const at::Tensor& logprobs,
                 const at::Tensor& unfiltered, const at::Tensor& entropy);

/// On CUDA: the gradient of these values: d_logits [R, V] (float32 or bfloat16) from g and, where defined,
/// g_unfiltered.
void pairs_gradient(const at::Tensor& logits, const PairQuery& query, const at::Tensor& g,
                    const at::Tensor& g_unfiltered, const at::Tensor& d_logits);

extern runtime::CudaSlot<std::vector<SampledToken>(const at::Tensor& logits, const std::vector<RowDraw>& draws,
                                                   bool with_entropy)>
    sample_rows_cuda;
extern runtime::CudaSlot<std::vector<SampledToken>(const at::Tensor& logits, const at::Tensor& token_ids,
                                                   const SamplingRule& rule, bool with_entropy)>
    score_rows_cuda;
extern runtime::CudaSlot<void(const at::Tensor&, const PairQuery&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&)>
    score_pairs_cuda;
extern runtime::CudaSlot<void(const at::Tensor&, const PairQuery&, const at::Tensor&, const at::Tensor&,
                              const at::Tensor&)>
    pairs_gradient_cuda;

}  // namespace nemo_rl::ops
