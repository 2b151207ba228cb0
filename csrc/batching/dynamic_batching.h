// Dynamic batching: micro-batches of similar lengths under a token budget.
#pragma once
#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace nemo_rl::batching {

struct DynamicBatchingOptions {
  std::int64_t batch_size = 0;             ///< rows of a chunk (a global batch)
  std::int64_t shards = 1;                 ///< divides batch_size
  std::int64_t max_tokens = 0;             ///< upper bound of rows x padded length of a micro-batch
  std::int64_t sequence_length_round = 1;  ///< padded lengths are multiples of it
  std::int64_t width = 0;                  ///< padded length of the input tensor: no micro-batch is longer
};

struct DynamicBatchingPlan {
  /// Row of every place: chunk after chunk, within a chunk shard after shard, within a shard by ascending length.
  std::vector<std::int64_t> order;
  /// [chunk][micro-batch]: first and end row within the shard's part of the chunk, the same for all shards.
  std::vector<std::vector<std::array<std::int64_t, 2>>> micro_batch_indices;
  /// [chunk][micro-batch]: padded length.
  std::vector<std::vector<std::int64_t>> micro_batch_lengths;
};

/// Sorts each chunk by length (stable), deals its rows out to the shards in turn, and cuts the places of a shard into
/// micro-batches: a row joins while (rows + 1) x longest padded length, over all shards, stays within max_tokens.
DynamicBatchingPlan plan_dynamic_batching(std::span<const std::int64_t> lengths, const DynamicBatchingOptions& options);

}  // namespace nemo_rl::batching
