// Attention on CUDA: what a thread block is asked to do, and the functions that launch the kernels. All pointers are device pointers;
// layouts and formulas are those of kernels/attention.h.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/attention.h"

namespace nemo_rl::kernels {

/// Query tokens of one sequence that a thread block takes with all heads of one kv head. Their keys are those of absolute positions
/// up to their own: rows of qkv (packed) or blocks of the cache (paged).
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
inline std::int64_t attention_backward_rows(std::int64_t head_dim) { return head_dim <= 128 ? 32 : 8; }

struct AttentionCudaArgs {
  AttentionShape shape;
  const void* qkv = nullptr;
  const void* cache = nullptr;  ///< paged; null: packed
  const std::int32_t* block_tables = nullptr;
  const AttentionBlock* blocks = nullptr;
  std::int64_t num_blocks = 0;
  void* out = nullptr;
  float* lse = nullptr;  ///< may be null
};
cudaError_t attention_forward_launch(const AttentionCudaArgs& args, AttentionRows rows, cudaStream_t stream);

/// Row t's keys and values go to position slots[t] % kKeyTile of cache block slots[t] / kKeyTile; nowhere where it is negative.
cudaError_t kv_cache_write_launch(const AttentionShape& shape, const void* qkv, const std::int64_t* slots, std::int64_t tokens, void* cache,
                                  cudaStream_t stream);
cudaError_t kv_cache_copy_launch(const AttentionShape& shape, void* cache, std::int64_t from, std::int64_t to, std::int64_t length,
                                 cudaStream_t stream);

/// kKeyTile own keys of one sequence from own position key_begin on; the sequences sharers[sharer_begin, sharer_end) have them in
/// their prefix.
struct AttentionKeyBlock {
  std::int64_t sequence = 0, key_begin = 0, sharer_begin = 0, sharer_end = 0;
};

struct AttentionBackwardCudaArgs {
  AttentionShape shape;
  const void *qkv = nullptr, *out = nullptr, *d_out = nullptr;
  const float* lse = nullptr;
  float* dots = nullptr;  ///< workspace [T, N]: d_out . out
  const AttentionSequence* sequences = nullptr;
  const std::int64_t* sharers = nullptr;
  const AttentionBlock* blocks = nullptr;  ///< query tokens, at most attention_backward_rows / group each
  std::int64_t num_blocks = 0;
  const AttentionKeyBlock* key_blocks = nullptr;
  std::int64_t num_key_blocks = 0;
  std::int64_t tokens = 0;
  void* d_qkv = nullptr;  ///< in qkv's type
};
cudaError_t attention_backward_launch(const AttentionBackwardCudaArgs& args, cudaStream_t stream);

}  // namespace nemo_rl::kernels
