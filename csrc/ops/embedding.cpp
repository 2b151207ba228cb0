#include "ops/embedding.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <vector>

#include "ops/kernel_types.h"
#include "ops/weight_blocks.h"

namespace nemo_rl::ops {

runtime::CudaSlot<decltype(embedding_forward)> embedding_forward_cuda("embedding_forward");
runtime::CudaSlot<void(const at::Tensor&, const at::Tensor&, const at::Tensor&)> embedding_backward_cuda(
    "embedding_backward");
runtime::CudaSlot<void(const at::Tensor&, const at::Tensor&)> add_column_sums_cuda("add_column_sums");

namespace {

void check_ids(const at::Tensor& token_ids, std::int64_t rows, const char* op) {
  NRL_CHECK_ARG(token_ids.is_cpu() && token_ids.scalar_type() == at::kLong && token_ids.is_contiguous(), op,
                ": token ids must be int64 on the CPU, got ", token_ids.scalar_type(), " on ", token_ids.device());
  check_token_ids({ptr<std::int64_t>(token_ids), static_cast<std::size_t>(token_ids.numel())}, rows, op);
}

}  // namespace

void check_token_ids(std::span<const std::int64_t> token_ids, std::int64_t vocab_size, const char* op) {
  for (std::size_t t = 0; t < token_ids.size(); ++t)
    NRL_CHECK_ARG(token_ids[t] >= 0 && token_ids[t] < vocab_size, op, ": token id ", token_ids[t], " at position ", t,
                  " is outside the vocabulary of ", vocab_size, " (tokenizer and model do not belong together?)");
}

void embedding_forward(const at::Tensor& table, const at::Tensor& token_ids, const at::Tensor& h,
                       at::ScalarType dtype) {
  const bool checked = token_ids.is_cuda() && token_ids.device() == table.device() &&
                       token_ids.scalar_type() == at::kLong && token_ids.is_contiguous();
  if (!checked) check_ids(token_ids, table.size(0), "embedding_forward");
  if (table.is_cuda()) return embedding_forward_cuda.get(table)(table, token_ids, h, dtype);
  const std::int64_t D = h.size(1);
  const auto* ids = ptr<std::int64_t>(token_ids);
  if (in_blocks(table)) {
    const BlockMatrix rows(table, D);
    return at::parallel_for(0, token_ids.numel(), 64, [&](std::int64_t begin, std::int64_t end) {
      std::vector<bfloat16> rounded(static_cast<std::size_t>(D));
      for (std::int64_t t = begin; t < end; ++t) {
        float* const to = mutable_ptr<float>(h) + t * D;
        if (dtype == at::kFloat) {
          kernels::unpack_blocks_f32(rows.format(), rows.tiles(), ids[t], 1, D, to, D);
        } else {
          kernels::unpack_blocks_bf16(rows.format(), rows.tiles(), ids[t], 1, D, rounded.data(), D);
          std::ranges::transform(rounded, to, [](bfloat16 weight) { return static_cast<float>(weight); });
        }
      }
    });
  }
  dispatch_floating(table.scalar_type(), "embedding_forward", [&](auto tag) {
    using T = decltype(tag);
    using A = accumulate_t<T>;
    at::parallel_for(0, token_ids.numel(), 64, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) {
        const T* from = ptr<T>(table) + ids[t] * D;
        A* to = mutable_ptr<A>(h) + t * D;
        for (std::int64_t d = 0; d < D; ++d) to[d] = static_cast<A>(from[d]);
      }
    });
  });
}

void embedding_backward(const at::Tensor& dh, const at::Tensor& token_ids, const at::Tensor& d_table) {
  check_ids(token_ids, d_table.size(0), "embedding_backward");
  if (dh.is_cuda()) return embedding_backward_cuda.get(dh)(dh, token_ids, d_table);
  const std::int64_t D = d_table.size(1);
  const auto* ids = ptr<std::int64_t>(token_ids);
  dispatch_floating(d_table.scalar_type(), "embedding_backward", [&](auto tag) {
    using A = accumulate_t<decltype(tag)>;
    at::parallel_for(0, D, 64, [&](std::int64_t begin, std::int64_t end) {  // columns: no two threads share a sum
      for (std::int64_t t = 0; t < token_ids.numel(); ++t) {
        const A* from = ptr<A>(dh) + t * D;
        A* to = mutable_ptr<A>(d_table) + ids[t] * D;
        for (std::int64_t d = begin; d < end; ++d) to[d] += from[d];
      }
    });
  });
}

void add_column_sums(const at::Tensor& x, const at::Tensor& out) {
  if (x.is_cuda()) return add_column_sums_cuda.get(x)(x, out);
  const std::int64_t T = x.size(0), C = x.size(1);
  dispatch_floating(x.scalar_type(), "add_column_sums", [&](auto tag) {
    using X = decltype(tag);
    using A = accumulate_t<X>;
    at::parallel_for(0, C, 256, [&](std::int64_t begin, std::int64_t end) {
      A* sums = mutable_ptr<A>(out);
      for (std::int64_t t = 0; t < T; ++t) {
        const X* row = ptr<X>(x) + t * x.stride(0);
        for (std::int64_t c = begin; c < end; ++c) sums[c] += static_cast<A>(row[c]);
      }
    });
  });
}

}  // namespace nemo_rl::ops
