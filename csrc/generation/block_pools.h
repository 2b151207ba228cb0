// The KV-cache blocks of a model: one pool of blocks for each attention window among its layers. A sequence holds
// blocks in every pool; behind a window they are released while it goes on.
#pragma once
#include <cstdint>
#include <vector>

#include "generation/block_manager.h"

namespace nemo_rl::generation {

/// The maximum number of blocks that a sequence of `tokens` positions holds in a pool, if a step computes at most
/// `chunk` of them.
std::int64_t most_blocks(std::int64_t window, std::int64_t block_size, std::int64_t tokens, std::int64_t chunk);

class BlockPools {
 public:
  struct Size {
    std::int64_t num_blocks = 0;
    std::int64_t window = 0;  ///< as in CachePool
  };
  BlockPools(const std::vector<Size>& pools, std::int64_t block_size);

  std::size_t size() const { return pools_.size(); }
  const BlockManager& operator[](std::size_t pool) const { return pools_[pool]; }
  /// Of all pools.
  std::int64_t num_blocks() const;
  std::int64_t num_used() const;

  // As those of BlockManager, in every pool.
  std::int64_t block_size() const { return pools_.front().block_size(); }
  std::int64_t blocks_for(std::int64_t tokens) const { return pools_.front().blocks_for(tokens); }
  bool extend(BlockTables& tables, std::int64_t tokens);
  BlockTables fork(const BlockTables& from, std::int64_t tokens, std::vector<BlockCopy>& copies);
  void release_unread(BlockTables& tables, std::int64_t cached);
  void release(BlockTables& tables);

 private:
  std::vector<BlockManager> pools_;
};

}  // namespace nemo_rl::generation
