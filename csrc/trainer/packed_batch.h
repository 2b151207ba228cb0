// Rows of a padded batch as packed tokens: no padding, the prompt that a group's samples share once, and of every row
// what stands before its last wanted token: a token's log-probability is read at the token before it, so neither that
// one nor what follows is computed.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "model/head_rows.h"
#include "ops/attention.h"

namespace nemo_rl::trainer {

/// A padded batch. Tensors are on the CPU and contiguous.
struct PaddedBatch {
  at::Tensor input_ids;      ///< [B, S] int64, right-padded
  at::Tensor input_lengths;  ///< [B] int64
  at::Tensor token_mask;     ///< [B, S] float32/int64 as bool: tokens whose log-probabilities (or values) are wanted;
                             ///< column 0 never is
  at::Tensor group_ids;      ///< [B] int64: rows with the same id >= 0 may share their prompt
};

/// Of one row; both 0 without a wanted token.
struct RowTokens {
  std::int64_t prompt = 0;  ///< tokens before the first wanted one: what the row may share with its group
  std::int64_t read = 0;    ///< tokens before the last wanted one: those that are computed
};
std::vector<RowTokens> row_tokens(const PaddedBatch& batch);

struct PackedBatch {
  at::Tensor token_ids;  ///< [T]
  at::Tensor positions;  ///< [T]
  std::vector<ops::AttentionSequence> sequences;
  model::TokenQuery query;
  std::vector<std::int64_t> places;  ///< [R] pair i belongs at b * S + t of the padded batch
};

/// Packs rows `samples` in this order. Consecutive rows of one group whose prompts are equal share it when
/// `share_prefix`. At least one of them has a wanted token.
PackedBatch pack_batch(const PaddedBatch& batch, const std::vector<std::int64_t>& samples, bool share_prefix);

struct MicroBatchOptions {
  std::int64_t max_samples = 0;  ///< samples of a micro-batch; 0: no such limit
  std::int64_t max_tokens =
      0;  ///< tokens of a micro-batch; 0: no such limit. One sample may be longer: it stands alone
  bool share_prefix = true;
};

/// Cuts `samples`, ascending rows, into micro-batches, groups kept together where the limits allow: a group's prompt
/// then counts once. Bins are filled first fit, longest first; the order of micro-batches and of rows inside is fixed
/// by the batch.
std::vector<std::vector<std::int64_t>> plan_micro_batches(const PaddedBatch& batch,
                                                          const std::vector<std::int64_t>& samples,
                                                          const MicroBatchOptions& options);

}  // namespace nemo_rl::trainer
