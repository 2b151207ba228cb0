// Token embedding, its gradient, and column sums for bias gradients.
#pragma once
#include <span>

#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

/// Throws ArgumentError unless all of token_ids (int64, on the CPU) are in [0, vocab_size).
void check_token_ids(std::span<const std::int64_t> token_ids, std::int64_t vocab_size, const char* op);

/// h[t] = table[token_ids[t]], widened to h's dtype (float32 for a bfloat16 table). token_ids are int64 [T] on the CPU,
/// where they are checked, also for a table on a CUDA device; or on that device, if check_token_ids has seen them.
/// A table in blocks (ops/weight_blocks.h) has the weights that unpack_blocks gives in `dtype`; h is float32 then.
void embedding_forward(const at::Tensor& table, const at::Tensor& token_ids, const at::Tensor& h, at::ScalarType dtype);

/// d_table[token_ids[t]] += dh[t], in the order of t for every row: the sum does not depend on threads.
void embedding_backward(const at::Tensor& dh, const at::Tensor& token_ids, const at::Tensor& d_table);

/// out[c] += sum over the rows of x [T, C] (the gradient of a bias), in blocks of fixed size.
void add_column_sums(const at::Tensor& x, const at::Tensor& out);

extern runtime::CudaSlot<decltype(embedding_forward)> embedding_forward_cuda;
extern runtime::CudaSlot<void(const at::Tensor& dh, const at::Tensor& token_ids, const at::Tensor& d_table)>
    embedding_backward_cuda;
extern runtime::CudaSlot<void(const at::Tensor& x, const at::Tensor& out)> add_column_sums_cuda;

}  // namespace nemo_rl::ops
