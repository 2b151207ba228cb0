// The clipped policy-gradient loss asked token by token, for the head to turn into gradients while it holds the logits.
#pragma once
#include "model/vocabulary_head.h"
#include "ops/clipped_pg_loss.h"

namespace nemo_rl::trainer {

struct TokenLoss {
  ops::ClippedPGInputs inputs;  ///< of tokens shaped like the batch's token_ids, of rows [B], global counts given;
                                ///< curr_logprobs unused. Without prev_logprobs those are the log-probabilities being
                                ///< computed
  ops::ClippedPGConfig config;

  /// Whether the gradient at a token needs that token's log-probability only: a token-level loss that looks at no whole
  /// row.
  static bool separable(const ops::ClippedPGConfig& config);

  /// For pairs that belong at `places` and to the rows `samples` (PackedBatch); all three outlive the result.
  model::PairLoss at(const std::vector<std::int64_t>& places, const std::vector<std::int64_t>& samples) const;
};

}  // namespace nemo_rl::trainer
