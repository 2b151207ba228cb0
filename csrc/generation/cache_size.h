// How many blocks each pool of the KV cache gets.
#pragma once
#include <cstdint>
#include <vector>

#include "generation/block_pools.h"

namespace nemo_rl::generation {

/// The blocks of one pool that the longest sequence needs alone, and those that all sequences can use at once.
struct PoolNeed {
  CachePool pool;
  std::int64_t least = 0;
  std::int64_t useful = 0;  ///< at least `least`
};

/// Returns the number of blocks of each pool within `max_bytes`: the useful ones; if they do not fit, the least ones
/// and in every pool the same share of those beyond. Returns zeros if the least ones do not fit.
std::vector<std::int64_t> divide_cache(const std::vector<PoolNeed>& needs, std::int64_t max_bytes);

std::int64_t least_blocks(const std::vector<PoolNeed>& needs);
std::int64_t least_bytes(const std::vector<PoolNeed>& needs);
std::int64_t useful_bytes(const std::vector<PoolNeed>& needs);
/// The number of blocks in `max_bytes`, if the pools have them in the proportion of the least ones.
std::int64_t blocks_within(const std::vector<PoolNeed>& needs, std::int64_t max_bytes);

/// The pools of a model with num_blocks[p] blocks each.
std::vector<BlockPools::Size> pool_sizes(const ModelRunner& runner, const std::vector<std::int64_t>& num_blocks);

/// Returns the tokens of the longest sequence that fits in `max_bytes` alone, if a step computes at most `chunk` of
/// them; below 2 none fits.
std::int64_t longest_sequence(const ModelRunner& runner, std::int64_t chunk, std::int64_t max_bytes);

}  // namespace nemo_rl::generation
