// Causal attention on packed sequences (training) and over a blocked KV cache (generation). Both run the same
// arithmetic: for every sequence and query row they give the same bits, whatever the split into chunks, batch, prefix
// sharing and threads. kernels/attention.h holds the formula and the layouts.
#pragma once
#include <span>
#include <vector>

#include "kernels/attention.h"
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

using kernels::AttentionSequence;
using kernels::kKeyTile;
using kernels::PagedSlice;

/// Heads of a packed `qkv` [T, (N+2K)*H].
struct AttentionHeads {
  std::int64_t num_heads = 0;     ///< N
  std::int64_t num_kv_heads = 0;  ///< K, divides N
  std::int64_t head_dim = 0;      ///< H, a multiple of 8 up to 512, on CUDA up to 256
  double scale = 1.0;             ///< usually 1/sqrt(H)
  std::int64_t window = 0;        ///< keys that a query sees at most, its own included; 0: all
  double softcap = 0;             ///< of the natural scores; 0: none
  at::Tensor sinks;               ///< [N], of qkv's dtype: one more term of the softmax a head; undefined: none
};

/// Keys and values of one layer: storage for `num_blocks` blocks [num_blocks, K, 2, H*kKeyTile], of each head a tile of
/// keys and one of values, in qkv's dtype and in the order of the kernels (kernels/attention.h); in huge pages where
/// the system grants them. Contents are undefined: what was never written does not matter, not even NaN.
at::Tensor kv_cache_allocate(std::int64_t num_blocks, const AttentionHeads& heads, at::ScalarType dtype,
                             at::Device device = at::kCPU);

/// out [T, N*H] = attention of every sequence; lse [T, N] (float32; float64 for float64 inputs; may be undefined) = the
/// natural log of the sum of exponentials, for the backward.
///
/// qkv is float32, bfloat16 (float32 arithmetic) or float64. The own rows of sequences must not overlap. A shared
/// prefix is the beginning of the own rows of another sequence that has no prefix itself. Rows of no sequence get
/// zeros.
void attention_forward(const at::Tensor& qkv, std::span<const AttentionSequence> sequences, const AttentionHeads& heads,
                       at::Tensor& out, at::Tensor& lse);

/// Gradient of attention_forward: d_qkv [T, (N+2K)*H] from qkv, its out and lse, and d_out [T, N*H].
///
/// d_out and d_qkv have one dtype: qkv's, or float32 under bfloat16 activations. Rows of a shared prefix gather from
/// all sequences that read them, in a fixed order: the same bits with any number of threads. Rows of no sequence get
/// zeros.
void attention_backward(const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& d_out, const at::Tensor& lse,
                        std::span<const AttentionSequence> sequences, const AttentionHeads& heads, at::Tensor& d_qkv);

/// d_sinks [N] += gradient of heads.sinks, from attention_forward's out and lse, and d_out [T, N*H]:
///   d_sinks[n] -= sum_t e^(sinks[n] - lse[t, n]) * (d_out[t, n] . out[t, n])   t ascending
/// Of lse's dtype.
void attention_sinks_backward(const at::Tensor& out, const at::Tensor& d_out, const at::Tensor& lse,
                              const AttentionHeads& heads, const at::Tensor& d_sinks);

/// Stores the keys and values of the slices' new tokens in the cache; out [T, N*H]: every new token attends to all
/// positions up to its own. No slice may read positions that another one writes. A PagedStep (ops/paged_step.h) serves
/// all layers.
void attention_paged(const at::Tensor& qkv, std::span<const PagedSlice> slices, const AttentionHeads& heads,
                     at::Tensor& cache, at::Tensor& out);

/// Copies the first `length` positions of block `from` into block `to`, all heads (copy-on-write).
void kv_cache_copy(at::Tensor& cache, std::int64_t from, std::int64_t to, std::int64_t length);

using kernels::AttentionShape;
extern runtime::CudaSlot<void(const at::Tensor& qkv, std::span<const AttentionSequence> sequences,
                              const AttentionShape& shape, const at::Tensor& sinks, const at::Tensor& out,
                              const at::Tensor& lse)>
    attention_forward_cuda;
/// owner[i]: the sequence that owns i's prefix, i itself where it has none.
extern runtime::CudaSlot<void(const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& d_out,
                              const at::Tensor& lse, std::span<const AttentionSequence> sequences,
                              const std::vector<std::int32_t>& owner, const AttentionShape& shape,
                              const at::Tensor& d_qkv)>
    attention_backward_cuda;
extern runtime::CudaSlot<void(const at::Tensor& out, const at::Tensor& d_out, const at::Tensor& lse,
                              const AttentionHeads& heads, const at::Tensor& d_sinks)>
    attention_sinks_backward_cuda;
struct PagedArrays;  // ops/paged_step.h
extern runtime::CudaSlot<void(const at::Tensor& qkv, const PagedArrays& arrays, const AttentionShape& shape,
                              const at::Tensor& sinks, const at::Tensor& cache, const at::Tensor& out)>
    attention_paged_cuda;
extern runtime::CudaSlot<void(const at::Tensor& cache, const AttentionShape& shape, std::int64_t from, std::int64_t to,
                              std::int64_t length)>
    kv_cache_copy_cuda;

}  // namespace nemo_rl::ops
