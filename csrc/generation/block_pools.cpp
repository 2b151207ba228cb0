#include "generation/block_pools.h"

#include <algorithm>

namespace nemo_rl::generation {

std::int64_t most_blocks(std::int64_t window, std::int64_t block_size, std::int64_t tokens, std::int64_t chunk) {
  const auto blocks_for = [&](std::int64_t positions) { return (positions + block_size - 1) / block_size; };
  if (window == 0) return blocks_for(tokens);
  // `chunk` new positions and those before them that the first one reads: n consecutive ones reach into most blocks if
  // the first is the last of a block
  const std::int64_t n = std::max<std::int64_t>(window - 1, 1) + chunk;
  return std::min(blocks_for(tokens), 1 + blocks_for(n - 1));
}

BlockPools::BlockPools(const std::vector<Size>& pools, std::int64_t block_size) {
  for (const Size& pool : pools) pools_.emplace_back(pool.num_blocks, block_size, pool.window);
}

std::int64_t BlockPools::num_blocks() const {
  std::int64_t sum = 0;
  for (const BlockManager& pool : pools_) sum += pool.num_blocks();
  return sum;
}

std::int64_t BlockPools::num_used() const {
  std::int64_t sum = 0;
  for (const BlockManager& pool : pools_) sum += pool.num_used();
  return sum;
}

bool BlockPools::extend(BlockTables& tables, std::int64_t tokens) {
  const std::int64_t held = tables.empty() ? 0 : static_cast<std::int64_t>(tables.front().size());
  const std::int64_t missing = blocks_for(tokens) - held;  // the same in all pools
  for (const BlockManager& pool : pools_)
    if (missing > pool.num_free()) return false;
  tables.resize(pools_.size());
  for (std::size_t p = 0; p < pools_.size(); ++p) pools_[p].extend(tables[p], tokens);
  return true;
}

BlockTables BlockPools::fork(const BlockTables& from, std::int64_t tokens, std::vector<BlockCopy>& copies) {
  BlockTables tables;
  for (std::size_t p = 0; p < pools_.size(); ++p) {
    const std::size_t before = copies.size();
    tables.push_back(pools_[p].fork(from[p], tokens, copies));
    for (std::size_t i = before; i < copies.size(); ++i) copies[i].pool = static_cast<std::int32_t>(p);
  }
  return tables;
}

void BlockPools::release_unread(BlockTables& tables, std::int64_t cached) {
  for (std::size_t p = 0; p < pools_.size(); ++p) pools_[p].release_unread(tables[p], cached);
}

void BlockPools::release(BlockTables& tables) {
  for (std::size_t p = 0; p < tables.size(); ++p) pools_[p].release(tables[p]);
  tables.clear();
}

}  // namespace nemo_rl::generation
