// Attention on CUDA: what a thread block is asked to do, and the functions that launch the kernels. All pointers are
// device pointers; layouts and formulas are those of kernels/attention.h.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/attention.h"
#include "kernels/attention_blocks.h"

namespace nemo_rl::kernels {

constexpr int kTile = static_cast<int>(kKeyTile);
constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;

/// Of raw scores q . k: capped = out * tanh(in * score), raw again.
struct Softcap {
  float in = 0, out = 0;  ///< 0: none
  NRL_HOST_DEVICE explicit Softcap(const AttentionShape& s)
      : in(s.softcap > 0 ? static_cast<float>(s.scale / s.softcap) : 0.0f),
        out(s.softcap > 0 ? static_cast<float>(s.softcap / s.scale) : 0.0f) {}
};

struct AttentionCudaArgs {
  AttentionShape shape;
  const void* qkv = nullptr;
  const void* sinks = nullptr;  ///< [N], of qkv's type; null: there are none
  const void* cache = nullptr;  ///< paged; null: packed
  const std::int32_t* block_tables = nullptr;
  const AttentionBlock* blocks = nullptr;
  std::int64_t num_blocks = 0;
  void* out = nullptr;
  float* lse = nullptr;  ///< may be null
};
cudaError_t attention_forward_launch(const AttentionCudaArgs& args, AttentionRows rows, cudaStream_t stream);
/// What it calls for bfloat16.
cudaError_t attention_forward_mma_launch(const AttentionCudaArgs& args, AttentionRows rows, cudaStream_t stream);

/// Row t's keys and values go to position slots[t] % kKeyTile of cache block slots[t] / kKeyTile; nowhere where it is
/// negative.
cudaError_t kv_cache_write_launch(const AttentionShape& shape, const void* qkv, const std::int64_t* slots,
                                  std::int64_t tokens, void* cache, cudaStream_t stream);
cudaError_t kv_cache_copy_launch(const AttentionShape& shape, void* cache, std::int64_t from, std::int64_t to,
                                 std::int64_t length, cudaStream_t stream);

/// AttentionBackwardBlocks::keys own keys of one sequence from own position key_begin on; the sequences
/// sharers[sharer_begin, sharer_end) have them in their prefix.
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
  const AttentionBlock* blocks = nullptr;  ///< query tokens, at most AttentionBackwardBlocks::query_rows / group each
  std::int64_t num_blocks = 0;
  const AttentionKeyBlock* key_blocks = nullptr;
  std::int64_t num_key_blocks = 0;
  std::int64_t tokens = 0;
  void* d_qkv = nullptr;  ///< in qkv's type
};
cudaError_t attention_backward_launch(const AttentionBackwardCudaArgs& args, cudaStream_t stream);
/// d_sinks [N] += gradient of the sinks [N], of out's type (ops/attention.h). terms: workspace [T, N]; parts: workspace
/// [ceil(T / kRowsPerPart), N]. Of the arguments it reads shape, out, d_out, lse and tokens.
cudaError_t attention_sinks_backward_launch(const AttentionBackwardCudaArgs& args, const void* sinks, float* terms,
                                            float* parts, float* d_sinks, cudaStream_t stream);
/// What it calls for bfloat16, once `dots` is filled.
cudaError_t attention_backward_mma_launch(const AttentionBackwardCudaArgs& args, cudaStream_t stream);

}  // namespace nemo_rl::kernels
