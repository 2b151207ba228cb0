// Choosing a token from one row of logits, and scoring a chosen one.
//
//   z = logits / temperature
//   top-k: keep z_v >= the k-th largest value, ties included; off for top_k <= 0
//   top-p: sort what is left ascending by (z, index) and keep where the cumulative probability > 1 - p, the last
//   always;
//          off for top_p = 1
//   token: inverse of the cumulative distribution of what is left, in vocabulary order, at a uniform number u
//   logprob: log-softmax over what is left (NeMo RL's "processed" log-probability), by the arithmetic of log_softmax.h
//   greedy: the first largest logit; its logprob is that of the unfiltered distribution at temperature 1
//
// sample_row and score_row give the same bits for the same token: the sampler calls one, the trainer the other. A row's
// result depends on that row only.
#pragma once
#include <cstdint>

#include "common/cpu_capability.h"
#include "kernels/log_softmax.h"

namespace nemo_rl::kernels {

struct SamplingRule {
  float temperature = 1;  ///< > 0
  float top_p = 1;        ///< in (0, 1]
  std::int64_t top_k = 0;
  bool greedy = false;
  /// Entries that are summed together, in (0, kVocabBlock]; another number than usual where the vocabulary lies in
  /// slices. What a filter leaves of a row is summed as usual.
  std::int64_t vocab_block = kVocabBlock;

  bool filters(std::int64_t V) const { return !greedy && ((top_k > 0 && top_k < V) || top_p < 1); }
};

/// token -1: the row holds a NaN or +inf, or is -inf throughout; logprob -inf: the filter removed the token.
struct SampledToken {
  std::int64_t token = -1;
  float logprob = 0;
  float entropy = 0;  ///< of the distribution that was sampled from, in nats; 0 unless asked for
};

struct FilterCandidate {
  std::uint32_t order = 0;  ///< increases with z
  std::int32_t id = 0;
  float mass = 0;  ///< exp(z - max)
};

/// Arrays of V entries each, needed only where rule.filters(V). After filter_row the first `kept` entries of logits and
/// ids describe the tokens that are left, in vocabulary order.
struct FilterScratch {
  FilterCandidate* candidates = nullptr;
  float* logits = nullptr;
  std::int32_t* ids = nullptr;
};

/// How many tokens the filter leaves; 0 where the row is not finite (see SampledToken).
using FilterRowFn = std::int64_t(const float* logits, std::int64_t V, const SamplingRule& rule,
                                 const FilterScratch& scratch);
NRL_DECLARE_CPU_KERNEL(filter_row, FilterRowFn);

/// u in [0, 1).
using SampleRowFn = SampledToken(const float* logits, std::int64_t V, const SamplingRule& rule, double u,
                                 const FilterScratch& scratch, bool with_entropy);
NRL_DECLARE_CPU_KERNEL(sample_row, SampleRowFn);

/// 0 <= token < V.
using ScoreRowFn = SampledToken(const float* logits, std::int64_t V, const SamplingRule& rule, std::int64_t token,
                                const FilterScratch& scratch, bool with_entropy);
NRL_DECLARE_CPU_KERNEL(score_row, ScoreRowFn);

}  // namespace nemo_rl::kernels
