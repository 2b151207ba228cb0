// The work of one thread block of the CUDA attention kernels. The values are plain, so that the core library can make
// the lists without CUDA.
#pragma once
#include "kernels/attention.h"

namespace nemo_rl::kernels {

/// Query tokens of one sequence that a thread block takes with all heads of one kv head. Their keys are those of
/// absolute positions up to their own: rows of qkv (packed) or blocks of the cache (paged). Without tokens it does
/// nothing.
struct AttentionBlock {
  std::int64_t query_row = 0;  ///< row of qkv of the first token
  std::int64_t tokens = 0;
  std::int64_t position = 0;       ///< absolute position of the first token
  std::int64_t prefix_start = 0;   ///< packed: row of position 0, where there is a prefix
  std::int64_t prefix_length = 0;  ///< packed
  std::int64_t own_start = 0;      ///< packed: row of position prefix_length
  std::int64_t block_table = 0;    ///< paged: index of its table in the table array
};

/// Rows (tokens times heads of a group) that a block takes at most: few where a step has one token a sequence. bfloat16
/// goes to tensor cores in strips of 16 rows.
enum class AttentionRows { few, many };
inline std::int64_t attention_block_rows(AttentionRows rows, const AttentionShape& shape) {
  if (rows == AttentionRows::few) return shape.type == ElementType::bfloat16 ? 16 : 8;
  return shape.head_dim <= 128 ? 64 : 32;
}

/// How the backward cuts its work: rows of queries and own keys that a block takes at most.
struct AttentionBackwardBlocks {
  std::int64_t query_rows, keys;
  explicit AttentionBackwardBlocks(const AttentionShape& shape) {
    const bool small = shape.head_dim <= 128;
    query_rows = shape.type == ElementType::bfloat16 ? (small ? 64 : 32) : (small ? 32 : 8);
    keys = shape.type == ElementType::bfloat16 ? query_rows : kKeyTile;
  }
  /// Heads that may share a kv head: blocks of keys take at most kKeyTile rows of queries at a time.
  std::int64_t most_group() const { return query_rows < kKeyTile ? query_rows : kKeyTile; }
};

}  // namespace nemo_rl::kernels
