// The lists by which the CUDA kernels find a step's tokens in the blocked cache. Plain vectors, made on the host.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/attention.h"
#include "kernels/attention_blocks.h"

namespace nemo_rl::ops {

struct PagedPlan {
  std::vector<std::int64_t>
      slots;  ///< [rows] where a row's key and value go: cache block * kKeyTile + position in it; -1: nowhere
  std::vector<kernels::AttentionBlock> blocks[2];  ///< for AttentionRows::few and many
  std::vector<std::int32_t> block_tables;          ///< of all slices, one after the other

  std::vector<kernels::AttentionBlock>& of(kernels::AttentionRows kind) { return blocks[static_cast<int>(kind)]; }
  const std::vector<kernels::AttentionBlock>& of(kernels::AttentionRows kind) const {
    return blocks[static_cast<int>(kind)];
  }
};

/// The lists of `rows` rows of which the slices take some. A row that no slice takes has a block without tokens, so
/// that a step of one token a slice has as many blocks as rows, however many slices there are.
PagedPlan paged_plan(std::span<const kernels::PagedSlice> slices, const kernels::AttentionShape& shape,
                     std::int64_t rows);

}  // namespace nemo_rl::ops
