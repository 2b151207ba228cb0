// What a thread block of the CUDA attention kernels is asked to do. Plain values, so that the core library can make the lists without
// knowing CUDA.
#pragma once
#include <cstdint>

namespace nemo_rl::kernels {

/// Query tokens of one sequence that a thread block takes with all heads of one kv head. Their keys are those of absolute positions
/// up to their own: rows of qkv (packed) or blocks of the cache (paged). Without tokens it does nothing.
struct AttentionBlock {
  std::int64_t query_row = 0;  ///< row of qkv of the first token
  std::int64_t tokens = 0;
  std::int64_t position = 0;       ///< absolute position of the first token
  std::int64_t prefix_start = 0;   ///< packed: row of position 0, where there is a prefix
  std::int64_t prefix_length = 0;  ///< packed
  std::int64_t own_start = 0;      ///< packed: row of position prefix_length
  std::int64_t block_table = 0;    ///< paged: index of its table in the table array
};

/// Rows (tokens times heads of a group) that a block takes at most: few where a step has one token a sequence.
enum class AttentionRows { few, many };
inline std::int64_t attention_block_rows(AttentionRows rows, std::int64_t head_dim) {
  return rows == AttentionRows::few ? 8 : (head_dim <= 128 ? 64 : 32);
}

}  // namespace nemo_rl::kernels
