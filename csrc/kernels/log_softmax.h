// Log-softmax of one row of logits: the one arithmetic by which the sampler reports a token's log-probability and the
// trainer recomputes it, so that both give the same bits.
//
//   z_v     = logits[v] * (1 / temperature)                         (the reciprocal is rounded once, to float)
//   max     = max_v z_v
//   log_sum = log sum_v exp(z_v - max)
//   logprob(token) = (z_token - max) - log_sum
//
// The sum is taken in blocks of kVocabBlock entries. Each block is summed around its own maximum with a fixed order of
// lanes, and blocks are combined in index order in double. A block can therefore be computed as soon as its logits
// exist (a language-model head that works in vocabulary tiles), and the result depends on the row alone.
#pragma once
#include <cstdint>

#include "common/cpu_capability.h"

namespace nemo_rl::kernels {

inline constexpr std::int64_t kVocabBlock = 2048;
inline constexpr std::int64_t kMaxVocab = std::int64_t{1} << 21;  ///< callers check

/// sum = sum exp(z - max) over a block; dot = sum exp(z - max) (z - max), only where entropy was asked for.
struct VocabBlockSum {
  float max = 0;
  float sum = 0;
  float dot = 0;
};

/// A non-finite log_sum tells of a NaN or +inf among the logits, or of a row that is -inf throughout.
struct LogSumExp {
  float max = 0;      ///< max_v z_v
  float log_sum = 0;  ///< log sum_v exp(z_v - max); the log-sum-exp is max + log_sum
  float entropy = 0;  ///< -sum_v p_v log p_v in nats; 0 unless asked for
};

struct LogSumExpF64 {
  double max = 0;
  double log_sum = 0;
  double entropy = 0;
};

/// One block: n <= kVocabBlock logits.
using VocabBlockSumFn = VocabBlockSum(const float* logits, std::int64_t n, float temperature, bool with_entropy);
NRL_DECLARE_CPU_KERNEL(vocab_block_sum, VocabBlockSumFn);

/// All blocks of a row, in index order.
using CombineBlockSumsFn = LogSumExp(const VocabBlockSum* blocks, std::int64_t count, bool with_entropy);
NRL_DECLARE_CPU_KERNEL(combine_block_sums, CombineBlockSumsFn);

/// vocab_block_sum over the row's blocks, then combine_block_sums. V >= 1, temperature > 0.
using LogSumExpRowFn = LogSumExp(const float* logits, std::int64_t V, float temperature, bool with_entropy);
NRL_DECLARE_CPU_KERNEL(log_sum_exp_row, LogSumExpRowFn);

/// (logit / temperature - max) - log_sum.
using TokenLogprobFn = float(float logit, float temperature, const LogSumExp& row);
NRL_DECLARE_CPU_KERNEL(token_logprob, TokenLogprobFn);

/// out[v] = exp(token_logprob(v)); out may be logits itself.
using SoftmaxRowFn = void(const float* logits, std::int64_t V, float temperature, const LogSumExp& row, float* out);
NRL_DECLARE_CPU_KERNEL(softmax_row, SoftmaxRowFn);

/// x[v] = c · tanh(x[v] / c): a softcap of logits (Gemma 2 and 4).
using SoftcapRowFn = void(float* x, std::int64_t n, float c);
NRL_DECLARE_CPU_KERNEL(softcap_row, SoftcapRowFn);

/// The same in float64, one entry after the other: for checks, not for speed.
using LogSumExpRowF64Fn = LogSumExpF64(const double* logits, std::int64_t V, double temperature, bool with_entropy);
NRL_DECLARE_CPU_KERNEL(log_sum_exp_row_f64, LogSumExpRowF64Fn);
using TokenLogprobF64Fn = double(double logit, double temperature, const LogSumExpF64& row);
NRL_DECLARE_CPU_KERNEL(token_logprob_f64, TokenLogprobF64Fn);

}  // namespace nemo_rl::kernels
