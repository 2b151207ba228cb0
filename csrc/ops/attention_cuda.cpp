// Attention on CUDA: cuts packed sequences into the blocks of query tokens and of keys that the kernels take, and
// brings that list to the device. All layers of a forward ask for the same list, which is uploaded once. Over the
// cache, a PagedStep holds the lists.
#include <algorithm>

#include "kernels/cuda/attention_launchers.h"
#include "kernels/cuda/model_launchers.h"
#include "ops/attention.h"
#include "ops/kernel_types.h"
#include "ops/paged_step.h"
#include "runtime/cuda_launch.h"

namespace nemo_rl::ops {
namespace {

using kernels::AttentionBlock;
using kernels::AttentionKeyBlock;
using kernels::AttentionRows;

void check_shape(const at::Tensor& qkv, const AttentionShape& shape, std::int64_t most_rows) {
  NRL_CHECK_ARG(shape.type != kernels::ElementType::float64,
                "attention: float64 is computed on the CPU only; qkv is on ", qkv.device().str());
  NRL_CHECK_ARG(shape.group() <= most_rows, "attention on CUDA: ", shape.num_heads, " heads of size ", shape.head_dim,
                " share ", shape.num_kv_heads, " key/value heads; at most ", most_rows, " may share one");
  NRL_CHECK_ARG(shape.scale > 0, "attention on CUDA: scores are scaled by ", shape.scale,
                "; expected a positive number");
  NRL_CHECK(reinterpret_cast<std::uintptr_t>(qkv.const_data_ptr()) % 16 == 0,
            "attention on CUDA: qkv must begin at a multiple of 16 bytes");
}

/// Own tokens of every sequence, at most `rows` rows of a group a block; long sequences' last blocks first, since they
/// take longest.
std::vector<AttentionBlock> packed_blocks(std::span<const AttentionSequence> sequences, std::int64_t rows_of_tokens) {
  std::vector<AttentionBlock> blocks;
  for (const AttentionSequence& s : sequences)
    for (std::int64_t token = 0; token < s.length; token += rows_of_tokens)
      blocks.push_back({s.start + token, std::min(rows_of_tokens, s.length - token), s.prefix_length + token,
                        s.prefix_start, s.prefix_length, s.start, 0});
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const auto& a, const auto& b) { return a.position + a.tokens > b.position + b.tokens; });
  return blocks;
}

void attention_forward_on_cuda(const at::Tensor& qkv, std::span<const AttentionSequence> sequences,
                               const AttentionShape& shape, const at::Tensor& sinks, const at::Tensor& out,
                               const at::Tensor& lse) {
  static thread_local runtime::UploadedArray<AttentionBlock> uploaded;
  const runtime::CudaLaunch launch(qkv, "attention_forward");
  const std::int64_t rows = kernels::attention_block_rows(AttentionRows::many, shape);
  check_shape(qkv, shape, rows);
  const auto blocks = packed_blocks(sequences, rows / shape.group());
  kernels::AttentionCudaArgs args;
  args.shape = shape;
  args.qkv = qkv.const_data_ptr();
  args.sinks = sinks.defined() ? sinks.const_data_ptr() : nullptr;
  args.blocks = static_cast<const AttentionBlock*>(uploaded.get(blocks, qkv).const_data_ptr());
  args.num_blocks = static_cast<std::int64_t>(blocks.size());
  args.out = out.data_ptr();
  args.lse = lse.defined() ? mutable_ptr<float>(lse) : nullptr;
  launch.check(kernels::attention_forward_launch(args, AttentionRows::many, launch.stream));
}

// ---------------------------------------------------------------- blocked cache

void attention_paged_on_cuda(const at::Tensor& qkv, const PagedArrays& arrays, const AttentionShape& shape,
                             const at::Tensor& sinks, const at::Tensor& cache, const at::Tensor& out) {
  const runtime::CudaLaunch launch(qkv, "attention_paged");
  check_shape(qkv, shape, kernels::attention_block_rows(AttentionRows::many, shape));
  launch.check(kernels::kv_cache_write_launch(shape, qkv.const_data_ptr(), arrays.slots, qkv.size(0), cache.data_ptr(),
                                              launch.stream));
  kernels::AttentionCudaArgs args;
  args.shape = shape;
  args.qkv = qkv.const_data_ptr();
  args.sinks = sinks.defined() ? sinks.const_data_ptr() : nullptr;
  args.cache = cache.const_data_ptr();
  args.block_tables = arrays.block_tables;
  args.out = out.data_ptr();
  for (const auto kind : {AttentionRows::few, AttentionRows::many}) {
    args.blocks = arrays.blocks[static_cast<int>(kind)];
    args.num_blocks = arrays.num_blocks[static_cast<int>(kind)];
    launch.check(kernels::attention_forward_launch(args, kind, launch.stream));
  }
}

void kv_cache_copy_on_cuda(const at::Tensor& cache, const AttentionShape& shape, std::int64_t from, std::int64_t to,
                           std::int64_t length) {
  const runtime::CudaLaunch launch(cache, "kv_cache_copy");
  NRL_CHECK_ARG(shape.type != kernels::ElementType::float64, "kv_cache_copy: float64 is computed on the CPU only");
  launch.check(kernels::kv_cache_copy_launch(shape, cache.data_ptr(), from, to, length, launch.stream));
}

// ---------------------------------------------------------------- backward

/// Blocks of every sequence's own keys, those with most queries first, and of each owner the sequences that share its
/// prefix.
std::vector<AttentionKeyBlock> key_blocks(std::span<const AttentionSequence> sequences,
                                          const std::vector<std::int32_t>& owner, std::int64_t keys,
                                          std::vector<std::int64_t>& sharers) {
  const auto count = static_cast<std::int64_t>(sequences.size());
  std::vector<std::int64_t> first(static_cast<std::size_t>(count) + 1, 0);
  const auto shares = [&](std::int64_t i) {
    return owner[static_cast<std::size_t>(i)] != i && sequences[static_cast<std::size_t>(i)].length > 0;
  };
  for (std::int64_t i = 0; i < count; ++i)
    if (shares(i)) ++first[static_cast<std::size_t>(owner[static_cast<std::size_t>(i)]) + 1];
  for (std::int64_t i = 0; i < count; ++i) first[static_cast<std::size_t>(i) + 1] += first[static_cast<std::size_t>(i)];
  sharers.resize(static_cast<std::size_t>(first.back()));
  auto next = first;
  for (std::int64_t i = 0; i < count; ++i)
    if (shares(i))
      sharers[static_cast<std::size_t>(next[static_cast<std::size_t>(owner[static_cast<std::size_t>(i)])]++)] = i;
  std::vector<std::pair<std::int64_t, AttentionKeyBlock>> by_cost;
  for (std::int64_t i = 0; i < count; ++i) {
    const AttentionSequence& s = sequences[static_cast<std::size_t>(i)];
    const std::int64_t begin = first[static_cast<std::size_t>(i)], end = first[static_cast<std::size_t>(i) + 1];
    std::int64_t shared = 0;
    for (std::int64_t j = begin; j < end; ++j)
      shared += sequences[static_cast<std::size_t>(sharers[static_cast<std::size_t>(j)])].length;
    for (std::int64_t key = 0; key < s.length; key += keys)
      by_cost.push_back({s.length - key + shared, {i, key, begin, end}});
  }
  std::stable_sort(by_cost.begin(), by_cost.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<AttentionKeyBlock> blocks;
  for (const auto& [cost, block] : by_cost) blocks.push_back(block);
  return blocks;
}

void attention_backward_on_cuda(const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& d_out,
                                const at::Tensor& lse, std::span<const AttentionSequence> sequences,
                                const std::vector<std::int32_t>& owner, const AttentionShape& shape,
                                const at::Tensor& d_qkv) {
  static thread_local runtime::UploadedArray<AttentionBlock> uploaded;
  static thread_local runtime::UploadedArray<AttentionKeyBlock> uploaded_keys;
  static thread_local runtime::UploadedArray<AttentionSequence> uploaded_sequences;
  static thread_local runtime::UploadedArray<std::int64_t> uploaded_sharers;
  const runtime::CudaLaunch launch(qkv, "attention_backward");
  const kernels::AttentionBackwardBlocks cut(shape);
  check_shape(qkv, shape, cut.most_group());
  NRL_CHECK_ARG(d_out.scalar_type() == qkv.scalar_type(), "attention_backward on CUDA: d_out is ",
                c10::toString(d_out.scalar_type()), "; expected qkv's ", c10::toString(qkv.scalar_type()));
  NRL_CHECK(reinterpret_cast<std::uintptr_t>(d_out.const_data_ptr()) % 16 == 0,
            "attention_backward: d_out must begin at a multiple of 16 bytes");
  std::vector<std::int64_t> sharers;
  const auto keys = key_blocks(sequences, owner, cut.keys, sharers);
  const auto blocks = packed_blocks(sequences, cut.query_rows / shape.group());
  const auto dots = launch.scratch(qkv.size(0) * shape.num_heads, at::kFloat);
  kernels::AttentionBackwardCudaArgs args;
  args.shape = shape;
  args.qkv = qkv.const_data_ptr(), args.out = out.const_data_ptr(), args.d_out = d_out.const_data_ptr();
  args.lse = ptr<float>(lse), args.dots = mutable_ptr<float>(dots);
  const std::vector<AttentionSequence> all(sequences.begin(), sequences.end());
  args.sequences = static_cast<const AttentionSequence*>(uploaded_sequences.get(all, qkv).const_data_ptr());
  args.sharers = static_cast<const std::int64_t*>(uploaded_sharers.get(sharers, qkv).const_data_ptr());
  args.blocks = static_cast<const AttentionBlock*>(uploaded.get(blocks, qkv).const_data_ptr());
  args.num_blocks = static_cast<std::int64_t>(blocks.size());
  args.key_blocks = static_cast<const AttentionKeyBlock*>(uploaded_keys.get(keys, qkv).const_data_ptr());
  args.num_key_blocks = static_cast<std::int64_t>(keys.size());
  args.tokens = qkv.size(0);
  args.d_qkv = d_qkv.data_ptr();
  launch.check(kernels::attention_backward_launch(args, launch.stream));
}

void attention_sinks_backward_on_cuda(const at::Tensor& out, const at::Tensor& d_out, const at::Tensor& lse,
                                      const AttentionHeads& heads, const at::Tensor& d_sinks) {
  const runtime::CudaLaunch launch(out, "attention_sinks_backward");
  NRL_CHECK_ARG(
      d_out.scalar_type() == out.scalar_type() && d_out.is_contiguous() && d_sinks.scalar_type() == at::kFloat,
      "attention_sinks_backward on CUDA: d_out must be contiguous ", c10::toString(out.scalar_type()),
      ", and d_sinks float32");
  kernels::AttentionBackwardCudaArgs args;
  args.shape = {heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.scale,
                out.scalar_type() == at::kFloat ? kernels::ElementType::float32 : kernels::ElementType::bfloat16};
  args.out = out.const_data_ptr(), args.d_out = d_out.const_data_ptr(), args.lse = ptr<float>(lse);
  args.tokens = out.size(0);
  const std::int64_t N = heads.num_heads, parts = (args.tokens + kernels::kRowsPerPart - 1) / kernels::kRowsPerPart;
  const auto terms = launch.scratch(args.tokens * N, at::kFloat), sums = launch.scratch(parts * N, at::kFloat);
  launch.check(kernels::attention_sinks_backward_launch(args, heads.sinks.const_data_ptr(), mutable_ptr<float>(terms),
                                                        mutable_ptr<float>(sums), mutable_ptr<float>(d_sinks),
                                                        launch.stream));
}

const bool registered = [] {
  attention_forward_cuda.set(attention_forward_on_cuda);
  attention_paged_cuda.set(attention_paged_on_cuda);
  kv_cache_copy_cuda.set(kv_cache_copy_on_cuda);
  attention_backward_cuda.set(attention_backward_on_cuda);
  attention_sinks_backward_cuda.set(attention_sinks_backward_on_cuda);
  return true;
}();

}  // namespace
}  // namespace nemo_rl::ops
