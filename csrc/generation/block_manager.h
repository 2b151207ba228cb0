// Tracks which sequences and prompts hold each KV-cache block of a pool. Blocks are reference-counted, so that the
// generations of one prompt can share them. No tensor is touched here.
#pragma once
#include <cstdint>
#include <vector>

#include "generation/model_runner.h"

namespace nemo_rl::generation {

class BlockManager {
 public:
  /// `window`: as in CachePool.
  BlockManager(std::int64_t num_blocks, std::int64_t block_size, std::int64_t window = 0);

  std::int64_t window() const { return window_; }
  std::int64_t num_blocks() const { return static_cast<std::int64_t>(references_.size()); }
  std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }
  std::int64_t num_used() const { return num_blocks() - num_free(); }
  std::int64_t block_size() const { return block_size_; }
  std::int64_t references(std::int32_t block) const;

  /// The number of blocks that `tokens` positions need.
  std::int64_t blocks_for(std::int64_t tokens) const { return (tokens + block_size_ - 1) / block_size_; }

  /// Extends `table` until it covers `tokens` positions. If too few blocks are free, returns false and changes nothing.
  bool extend(BlockTable& table, std::int64_t tokens);

  /// Returns a new table of the first `tokens` positions of `from`. Full blocks are shared. A partial last block is
  /// copied: the copy is appended to `copies`, and needs a free block.
  BlockTable fork(const BlockTable& from, std::int64_t tokens, std::vector<BlockCopy>& copies);

  /// Drops the table's references to the blocks that no token from position `cached` on reads.
  void release_unread(BlockTable& table, std::int64_t cached);
  /// Drops the table's references to its blocks and empties it.
  void release(BlockTable& table);

 private:
  std::int32_t take();
  void drop(std::int32_t block);

  std::int64_t block_size_, window_;
  std::vector<std::int32_t> references_;
  std::vector<std::int32_t> free_;  // the block freed last is used first: it is likely in the CPU's cache
};

}  // namespace nemo_rl::generation
