// Gradient of token log-probabilities, and of the entropy, with respect to a row of logits.
#pragma once
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"
#include "kernels/log_softmax.h"

namespace nemo_rl::kernels {

/// out[v] = -g / temperature · softmax(logits / temperature)[v]. The caller adds the targets' own share.
template <class O>
using LogprobBackwardRow = void(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g,
                                O* out);
NRL_DECLARE_CPU_KERNEL(logprob_backward_row_f32, LogprobBackwardRow<float>);
NRL_DECLARE_CPU_KERNEL(logprob_backward_row_bf16, LogprobBackwardRow<bfloat16>);

/// The same with the gradient h of the row's entropy H:
///   out[v] = -softmax[v] / temperature · (g + h (log softmax[v] + H))
template <class O>
using EntropyBackwardRow = void(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float g,
                                float h, O* out);
NRL_DECLARE_CPU_KERNEL(entropy_backward_row_f32, EntropyBackwardRow<float>);
NRL_DECLARE_CPU_KERNEL(entropy_backward_row_bf16, EntropyBackwardRow<bfloat16>);

}  // namespace nemo_rl::kernels
