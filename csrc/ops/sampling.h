// Sampling and scoring of many rows of logits; the arithmetic is kernels/sampling.h's.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "kernels/sampling.h"

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

}  // namespace nemo_rl::ops
