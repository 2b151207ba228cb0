// Rows of logits to tokens, log-probabilities and gradients on CUDA: arguments and launchers. All pointers are device
// pointers.
#pragma once
#include <cuda_runtime_api.h>

#include "common/bfloat16.h"
#include "kernels/sampling.h"

namespace nemo_rl::kernels {

struct CudaDraw {
  std::int64_t logits_row = 0;
  SamplingRule rule;
  double uniform = 0;
};
/// out [num_draws]: what sample_row says of each draw.
cudaError_t sample_rows_launch(const float* logits, std::int64_t V, const CudaDraw* draws, std::int64_t num_draws,
                               bool with_entropy, SampledToken* out, cudaStream_t stream);

/// Pairs i with first[r] <= i < first[r + 1] ask for token targets[i] after row r; arrays are indexed by pair from
/// `first[0]` on as given.
struct PairRows {
  const float* logits = nullptr;  ///< [rows, V]
  std::int64_t rows = 0, V = 0;
  SamplingRule rule;                    ///< not greedy
  const std::int64_t* first = nullptr;  ///< [rows + 1]
  const std::int64_t* targets = nullptr;
};
/// logprobs under `rule` (-inf where the filter removes the token, NaN where the row is not finite); unfiltered:
/// without its filter; entropy [rows] of the distribution under `rule`. The last two may be null.
cudaError_t score_pairs_launch(const PairRows& args, float* logprobs, float* unfiltered, float* entropy,
                               cudaStream_t stream);
/// d_logits[r, v] = d sum_i (g[i] logprob_i + g_unfiltered[i] unfiltered_i) / d logits[r, v]; g_unfiltered may be null.
template <class O>
cudaError_t pairs_gradient_launch(const PairRows& args, const float* g, const float* g_unfiltered, O* d_logits,
                                  cudaStream_t stream);

}  // namespace nemo_rl::kernels
