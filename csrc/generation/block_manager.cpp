#include "generation/block_manager.h"

#include <algorithm>
#include <utility>

#include "common/check.h"

namespace nemo_rl::generation {

BlockManager::BlockManager(std::int64_t num_blocks, std::int64_t block_size, std::int64_t window)
    : block_size_(block_size), window_(window) {
  NRL_CHECK(num_blocks >= 0 && block_size >= 1, num_blocks, " blocks of ", block_size, " positions");
  references_.assign(num_blocks, 0);
  for (std::int64_t b = num_blocks; b-- > 0;) free_.push_back(static_cast<std::int32_t>(b));
}

std::int64_t BlockManager::references(std::int32_t block) const { return references_.at(block); }

std::int32_t BlockManager::take() {
  NRL_CHECK(!free_.empty(), "no free cache block");
  const std::int32_t block = free_.back();
  free_.pop_back();
  references_[block] = 1;
  return block;
}

bool BlockManager::extend(BlockTable& table, std::int64_t tokens) {
  const std::int64_t missing = blocks_for(tokens) - static_cast<std::int64_t>(table.size());
  if (missing > num_free()) return false;
  for (std::int64_t i = 0; i < missing; ++i) table.push_back(take());
  return true;
}

BlockTable BlockManager::fork(const BlockTable& from, std::int64_t tokens, std::vector<BlockCopy>& copies) {
  NRL_CHECK(blocks_for(tokens) <= static_cast<std::int64_t>(from.size()), "fork of ", tokens, " positions from ",
            from.size(), " blocks");
  const std::int64_t full = tokens / block_size_;
  BlockTable table(from.begin(), from.begin() + full);
  for (const std::int32_t block : table)
    if (block != kNoBlock) ++references_[block];
  if (const std::int64_t rest = tokens % block_size_) {
    const std::int32_t own = take();
    copies.push_back({from[full], own, static_cast<std::int32_t>(rest)});
    table.push_back(own);
  }
  return table;
}

void BlockManager::drop(std::int32_t block) {
  NRL_CHECK(references_.at(block) > 0, "cache block ", block, " was released twice");
  if (--references_[block] == 0) free_.push_back(block);
}

/// The token at position `cached` reads the `window - 1` positions before it, a later one none before those. The last
/// position stays with every window, because KeptRows looks it up.
void BlockManager::release_unread(BlockTable& table, std::int64_t cached) {
  if (window_ == 0) return;
  const std::int64_t unread = cached - std::max<std::int64_t>(window_ - 1, 1);
  for (std::int64_t i = unread / block_size_ - 1; i >= 0 && table[i] != kNoBlock; --i)
    drop(std::exchange(table[i], kNoBlock));
}

void BlockManager::release(BlockTable& table) {
  for (const std::int32_t block : table)
    if (block != kNoBlock) drop(block);
  table.clear();
}

}  // namespace nemo_rl::generation
