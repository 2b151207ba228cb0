// One step over a blocked cache: its tokens and the place of each token's keys. It is made once for all layers.
#pragma once
#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "kernels/attention_blocks.h"
#include "ops/attention.h"

namespace nemo_rl::ops {

/// The lists of a PagedPlan on a CUDA device.
struct PagedArrays {
  const std::int64_t* slots = nullptr;
  const kernels::AttentionBlock* blocks[2] = {nullptr, nullptr};  ///< for AttentionRows::few and many
  std::int64_t num_blocks[2] = {0, 0};
  const std::int32_t* block_tables = nullptr;
};

/// On a CUDA device everything lies in one buffer, which one copy fills. Take two steps with the same number of rows
/// and one token a slice. While place() is the same, their arrays have the same addresses. So work that was recorded
/// with one step serves the other.
class PagedStep {
 public:
  PagedStep(const AttentionHeads& heads, at::Device device) : heads_(heads), device_(device) {}

  /// Row query_start + i of a slice is token_ids' row of that number; `rows` may be more than there are tokens: the
  /// others have token 0 at position 0, write nothing into the cache and get no attention. The tables that the slices
  /// name must outlive the step; blocks before the heads' window may be -1. Throws ArgumentError for a slice beyond the
  /// rows, its table, or the cache's `num_blocks`.
  void set(std::vector<PagedSlice> slices, std::span<const std::int64_t> token_ids, std::int64_t rows,
           std::int64_t num_blocks);

  std::span<const PagedSlice> slices() const { return slices_; }
  const at::Tensor& token_ids() const { return token_ids_; }     ///< int64 [rows] on the device
  const at::Tensor& positions() const { return positions_; }     ///< int64 [rows] on the device
  std::int64_t num_positions() const { return num_positions_; }  ///< larger than every position
  std::int64_t num_blocks() const { return num_blocks_; }        ///< of the cache
  const AttentionHeads& heads() const { return heads_; }
  const PagedArrays& arrays() const { return arrays_; }  ///< CUDA only
  const void* place() const { return buffer_.defined() ? buffer_.const_data_ptr() : nullptr; }

 private:
  void upload();

  AttentionHeads heads_;
  at::Device device_;
  std::vector<PagedSlice> slices_;
  std::vector<std::int64_t> host_;
  at::Tensor buffer_, token_ids_, positions_;
  std::int64_t num_positions_ = 0, num_blocks_ = 0;
  PagedArrays arrays_;
};

/// attention_paged (ops/attention.h) of the step's slices; `heads`: those of the step, with a layer's sinks. lse as in
/// attention_forward; may be undefined, and must be on CUDA.
void attention_paged(const at::Tensor& qkv, const PagedStep& step, const AttentionHeads& heads, at::Tensor& cache,
                     at::Tensor& out, const at::Tensor& lse = {});

}  // namespace nemo_rl::ops
