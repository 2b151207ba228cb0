// The tokens that a row of logits makes likeliest, for callers that want to see what else could have been drawn.
#pragma once
#include <cstdint>
#include <vector>

#include "ops/sampling.h"

namespace nemo_rl::ops {

/// Most tokens that may be asked for.
inline constexpr std::int64_t kMostLikeliest = 20;

/// The `count` likeliest tokens of row `row` of logits [R, V] (float32) under `rule`, likeliest first, equal ones by
/// id; fewer where the filter leaves fewer. Log-probabilities are score_rows', bit for bit. Throws ValueError unless
/// 0 <= count <= kMostLikeliest.
std::vector<SampledToken> likeliest(const at::Tensor& logits, std::int64_t row, std::int64_t count,
                                    const SamplingRule& rule);

}  // namespace nemo_rl::ops
