// Host functions that launch the CUDA kernels of the model: elementwise ops, norms, embedding, attention, optimizer,
// and what turns logits into tokens and log-probabilities. All pointers are device pointers. They return what
// cudaGetLastError says after the launch.
#pragma once
#include <cuda_runtime_api.h>

#include "kernels/adamw.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/swiglu.h"
#include "kernels/weight_blocks.h"

namespace nemo_rl::kernels {

inline constexpr std::int64_t kRowsPerPart = 64;  ///< rows whose column sums are one part

// ---- elementwise (elementwise.cu)
template <class T>
cudaError_t rope_launch(const RopeArgs<T>& args, std::int64_t tokens, cudaStream_t stream);
template <class T>
cudaError_t swiglu_forward_launch(const T* gate_up, T* act, std::int64_t I, std::int64_t tokens, Gate gate,
                                  cudaStream_t stream);
template <class T>
cudaError_t swiglu_backward_launch(const T* d_act, const T* gate_up, T* d_gate_up, std::int64_t I, std::int64_t tokens,
                                   Gate gate, cudaStream_t stream);
/// y[r, :] = bias, or y[r, :] + bias where `accumulate`: what a product with a bias is then added to.
template <class T, class O>
cudaError_t bias_rows_launch(const T* bias, O* y, std::int64_t stride, std::int64_t rows, std::int64_t N,
                             bool accumulate, cudaStream_t stream);
template <class M, class V>
cudaError_t adamw_launch(const AdamWArgs<float, M, V>& args, std::int64_t n, cudaStream_t stream);

// ---- RMS norm (rms_norm.cu); `groups` is the outer size
template <class X, class T>
cudaError_t rms_norm_forward_launch(const RmsNormForwardArgs<X, T>& args, std::int64_t groups, cudaStream_t stream);
/// parts: workspace [ceil(groups / kRowsPerPart), D]; dw [D] is added to. dx may be dy.
template <class X, class G, class T>
cudaError_t rms_norm_backward_launch(const RmsNormBackwardArgs<X, G, T>& args, std::int64_t groups, float* parts,
                                     float* dw, cudaStream_t stream);

// ---- embedding (embedding.cu)
template <class T>
cudaError_t embedding_forward_launch(const T* table, const std::int64_t* ids, float* h, std::int64_t tokens,
                                     std::int64_t D, cudaStream_t stream);
/// d_table[rows[u]] += sum of dh[tokens[i]] for first[u] <= i < first[u + 1], in this order; `rows` are distinct.
struct EmbeddingBackwardArgs {
  const float* dh;
  const std::int64_t *rows, *first, *tokens;
  float* d_table;
  std::int64_t num_rows, D;
};
cudaError_t embedding_backward_launch(const EmbeddingBackwardArgs& args, cudaStream_t stream);

// ---- weights in blocks (weight_blocks.cu)
/// out[rows, K] = the weights of rows [first, first + rows) of the matrix at `tiles`.
template <class T>
cudaError_t unpack_blocks_launch(BlockFormat format, const std::byte* tiles, std::int64_t first, std::int64_t rows,
                                 std::int64_t K, T* out, std::int64_t ldo, cudaStream_t stream);
/// h[t, D] = the weights of row ids[t], rounded to T.
template <class T>
cudaError_t embedding_blocks_launch(BlockFormat format, const std::byte* tiles, const std::int64_t* ids, float* h,
                                    std::int64_t tokens, std::int64_t D, cudaStream_t stream);

// ---- sums (flat_reduce.cu)
/// out[c] += sum of parts[p, c] over p.
cudaError_t add_parts_launch(const float* parts, std::int64_t num_parts, std::int64_t columns, float* out,
                             cudaStream_t stream);
/// parts: workspace [ceil(rows / kRowsPerPart), columns]; out [columns] is added to.
template <class X>
cudaError_t add_column_sums_launch(const X* x, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                                   float* parts, float* out, cudaStream_t stream);
/// squares [ceil(n / block)]: the sum of the squares of each `block` entries.
cudaError_t block_squares_launch(const float* x, std::int64_t n, std::int64_t block, double* squares,
                                 cudaStream_t stream);
/// parts [ceil(n / kDigestBlock)]: the digest of each block of bytes.
cudaError_t weight_digest_launch(const void* bytes, std::int64_t n, std::uint64_t* parts, cudaStream_t stream);

}  // namespace nemo_rl::kernels
