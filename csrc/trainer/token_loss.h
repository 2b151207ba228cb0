// The clipped policy-gradient loss evaluated token by token, so that the LM head computes gradients while it holds the
// logits.
#pragma once
#include "model/vocabulary_head.h"
#include "ops/clipped_pg_loss.h"

namespace nemo_rl::trainer {

struct TokenLoss {
  ops::ClippedPGInputs inputs;  ///< of tokens shaped like the batch's token_ids, of rows [B], global counts given;
                                ///< curr_logprobs unused. Without prev_logprobs those are the log-probabilities being
                                ///< computed
  ops::ClippedPGConfig config;

  /// Whether the gradient at a token depends only on that token's log-probability: true for token-level losses without
  /// terms of whole rows.
  static bool separable(const ops::ClippedPGConfig& config);

  /// Returns the loss of the pairs with these `places` and `samples` (see PackedBatch). Both vectors and this object
  /// must outlive the result.
  model::PairLoss at(const std::vector<std::int64_t>& places, const std::vector<std::int64_t>& samples) const;
};

}  // namespace nemo_rl::trainer
