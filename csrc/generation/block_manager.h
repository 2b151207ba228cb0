// Keeps track of who holds which cache block. Blocks have reference counts, so that the generations of one prompt read
// the same blocks. No tensor is touched here.
#pragma once
#include <cstdint>
#include <vector>

#include "generation/model_runner.h"

namespace nemo_rl::generation {

/// Cache blocks of positions [i * block_size, (i + 1) * block_size), in order.
using BlockTable = std::vector<std::int32_t>;

class BlockManager {
 public:
  BlockManager(std::int64_t num_blocks, std::int64_t block_size);

  std::int64_t num_blocks() const { return static_cast<std::int64_t>(references_.size()); }
  std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t num_used() const { return num_blocks() - num_free(); }
  std::int64_t block_size() const { return block_size_; }
  std::int64_t references(std::int32_t block) const;

  /// Blocks that `tokens` positions fill.
  std::int64_t blocks_for(std::int64_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }

  /// Extends `table` until it covers `tokens` positions. False, and nothing changed, when too few blocks are free.
  bool extend(BlockTable& table, std::int64_t tokens);

  /// A table of its own over the first `tokens` positions of `from`: full blocks are shared, a last partial one is
  /// copied, which appends to `copies`. Needs one free block where there is a partial one.
  BlockTable fork(const BlockTable& from, std::int64_t tokens, std::vector<BlockCopy>& copies);

  /// Gives up the table's references and empties it.
  void release(BlockTable& table);

 private:
  std::int32_t take();

  std::int64_t block_size_;
  std::vector<std::int32_t> references_;
  std::vector<std::int32_t> free_;  // the block freed last is used first: it is likely in the CPU's cache
};

}  // namespace nemo_rl::generation
