// Rows of a batch as packed tokens. A prompt that the samples of a group share is packed once. A token's
// log-probability is computed at the token before it, so every row is packed only up to the token before its last token
// to score.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "model/head_rows.h"
#include "ops/attention.h"

namespace nemo_rl::trainer {

/// B rows of tokens in one array of T tokens. Without padding, each row begins where the previous one ends; padded rows
/// [B, S] begin at b * S. Tensors are contiguous and on the CPU.
struct RowBatch {
  at::Tensor token_ids;   ///< int64, T elements
  at::Tensor starts;      ///< [B] int64: offset of each row
  at::Tensor lengths;     ///< [B] int64
  at::Tensor token_mask;  ///< bool, shaped like token_ids: the tokens to score (log-probabilities or values); never
                          ///< a row's first token
  at::Tensor group_ids;   ///< [B] int64: rows with the same id >= 0 may share their prompt
  at::Tensor targets;     ///< [T, K] int64, or undefined: the tokens that are scored in place of each token to score,
                          ///< with results [T, K]; by default that token alone, with results shaped like token_ids
};

/// Token counts of one row; both 0 if it has no token to score.
struct RowTokens {
  std::int64_t prompt = 0;  ///< tokens before the first token to score, which the row may share with its group
  std::int64_t read = 0;    ///< tokens before the last token to score, which are computed
};
std::vector<RowTokens> row_tokens(const RowBatch& batch);

struct PackedBatch {
  at::Tensor token_ids;  ///< [T]
  at::Tensor positions;  ///< [T]
  std::vector<ops::AttentionSequence> sequences;
  model::TokenQuery query;
  std::int64_t rows() const { return static_cast<std::int64_t>(query.rows.size()); }
  std::vector<std::int64_t> places;   ///< [R] index of pair i in the results
  std::vector<std::int64_t> samples;  ///< [R] the row of pair i
};

/// Packs the rows `samples` in this order. With `share_prefix`, consecutive rows of a group with equal prompts share
/// the prompt. At least one row must have a token to score.
PackedBatch pack_batch(const RowBatch& batch, const std::vector<std::int64_t>& samples, bool share_prefix);

/// Returns the number of tokens that `pack_batch` packs for these rows. At least one row must have a token to score.
std::int64_t packed_tokens(const RowBatch& batch, const std::vector<std::int64_t>& samples, bool share_prefix);

/// Units of rows that should be computed together, because they share a prompt.
struct PromptUnits {
  std::vector<std::vector<std::int64_t>> rows;
  std::vector<std::int64_t> tokens;  ///< tokens computed for each unit, with its prompt counted once
};

/// Splits `samples`, ascending rows, into units: runs of rows with one prompt, split again at `max_tokens` tokens. A
/// single row that is longer forms a separate unit.
PromptUnits prompt_units(const RowBatch& batch, const std::vector<std::int64_t>& samples, std::int64_t max_tokens,
                         bool share_prefix);

}  // namespace nemo_rl::trainer
