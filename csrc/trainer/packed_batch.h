// Rows of a batch as packed tokens: the prompt that a group's samples share once, and of every row what stands before
// its last wanted token: a token's log-probability is read at the token before it, so neither that one nor what follows
// is computed.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "model/head_rows.h"
#include "ops/attention.h"

namespace nemo_rl::trainer {

/// B rows of tokens in one array of T: without padding a row begins where the one before it ends, and padded rows
/// [B, S] begin at b * S. Tensors are on the CPU and contiguous.
struct RowBatch {
  at::Tensor token_ids;   ///< int64, T elements
  at::Tensor starts;      ///< [B] int64: where each row begins
  at::Tensor lengths;     ///< [B] int64
  at::Tensor token_mask;  ///< bool, shaped like token_ids: tokens whose log-probabilities (or values) are wanted; a
                          ///< row's first token never is
  at::Tensor group_ids;   ///< [B] int64: rows with the same id >= 0 may share their prompt
  at::Tensor targets;     ///< [T, K] int64, or undefined: the tokens that are scored at each wanted token's place, with
                          ///< results [T, K]; by default that token alone, with results shaped like token_ids
};

/// Of one row; both 0 without a wanted token.
struct RowTokens {
  std::int64_t prompt = 0;  ///< tokens before the first wanted one: what the row may share with its group
  std::int64_t read = 0;    ///< tokens before the last wanted one: those that are computed
};
std::vector<RowTokens> row_tokens(const RowBatch& batch);

struct PackedBatch {
  at::Tensor token_ids;  ///< [T]
  at::Tensor positions;  ///< [T]
  std::vector<ops::AttentionSequence> sequences;
  model::TokenQuery query;
  std::int64_t rows() const { return static_cast<std::int64_t>(query.rows.size()); }
  std::vector<std::int64_t> places;   ///< [R] pair i belongs at this element of the results
  std::vector<std::int64_t> samples;  ///< [R] the row that pair i belongs to
};

/// Packs rows `samples` in this order. Consecutive rows of one group whose prompts are equal share it when
/// `share_prefix`. At least one of them has a wanted token.
PackedBatch pack_batch(const RowBatch& batch, const std::vector<std::int64_t>& samples, bool share_prefix);

/// How many tokens `pack_batch` of these rows computes. At least one of them has a wanted token.
std::int64_t packed_tokens(const RowBatch& batch, const std::vector<std::int64_t>& samples, bool share_prefix);

/// Rows that are better computed together, because they share a prompt.
struct PromptUnits {
  std::vector<std::vector<std::int64_t>> rows;
  std::vector<std::int64_t> tokens;  ///< of each unit: those that are computed, its prompt once
};

/// Cuts `samples`, ascending rows, into units: runs of one prompt, cut again where `max_tokens` is reached. One row may
/// be longer: it is a unit of its own.
PromptUnits prompt_units(const RowBatch& batch, const std::vector<std::int64_t>& samples, std::int64_t max_tokens,
                         bool share_prefix);

}  // namespace nemo_rl::trainer
