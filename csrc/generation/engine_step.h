// The common part of all engines: the checks of a request, and a step, which schedules, runs a forward pass, samples
// and appends the tokens.
#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "generation/model_runner.h"
#include "generation/scheduler.h"

namespace nemo_rl::generation {

/// Totals since the last reset.
struct EngineMetrics {
  std::int64_t steps = 0;
  std::int64_t generated_tokens = 0;
  std::int64_t prefill_tokens = 0;  ///< prompt tokens computed, and tokens recomputed after a preemption
  std::int64_t decode_tokens = 0;   ///< computed in decode, with accepted drafts
  std::int64_t draft_tokens = 0;    ///< drafts computed
  std::int64_t accepted_draft_tokens = 0;
  std::int64_t shared_prompt_tokens =
      0;                            ///< prompt tokens that generations took from their group instead of computing them
  std::int64_t sequence_steps = 0;  ///< running sequences, summed over steps
  std::int64_t peak_blocks = 0;
  std::int64_t preemptions = 0;
  double forward_seconds = 0;
  double sampling_seconds = 0;
};

/// A callback: request `request` has sampled `token_id`.
using Drawn = std::function<void(std::int64_t request, std::int64_t token_id)>;

/// Throws ValueError for an empty prompt, or a token id outside of the vocabulary of V tokens. The error names
/// `prompt`.
void check_prompt(std::int64_t prompt, const std::vector<std::int64_t>& token_ids, std::int64_t V);
/// Throws ValueError for invalid sampling parameters, max_new_tokens < 1, or stop strings without token bytes.
void check_sampling(const SamplingParams& params, const TokenBytes& token_bytes);

/// Runs one step of the scheduler's sequences. Returns the sequences that have ended, which no longer hold blocks.
/// `drawn` (may be null) is called for every token. Throws RuntimeError for logits that are not finite; the caller must
/// then abort the scheduler.
std::vector<const Sequence*> run_step(ModelRunner& runner, Scheduler& scheduler, const TokenBytes& token_bytes,
                                      bool with_entropy, EngineMetrics& metrics, const Drawn& drawn);

}  // namespace nemo_rl::generation
