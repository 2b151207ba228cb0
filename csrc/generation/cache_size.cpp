#include "generation/cache_size.h"

#include <algorithm>

namespace nemo_rl::generation {
namespace {

template <class Count>
std::int64_t sum(const std::vector<PoolNeed>& needs, const Count& count) {
  std::int64_t sum = 0;
  for (const PoolNeed& need : needs) sum += count(need);
  return sum;
}

}  // namespace

std::int64_t least_blocks(const std::vector<PoolNeed>& needs) {
  return sum(needs, [](const PoolNeed& n) { return n.least; });
}

std::int64_t least_bytes(const std::vector<PoolNeed>& needs) {
  return sum(needs, [](const PoolNeed& n) { return n.least * n.pool.bytes_per_block; });
}

std::int64_t useful_bytes(const std::vector<PoolNeed>& needs) {
  return sum(needs, [](const PoolNeed& n) { return n.useful * n.pool.bytes_per_block; });
}

std::int64_t blocks_within(const std::vector<PoolNeed>& needs, std::int64_t max_bytes) {
  return max_bytes / std::max<std::int64_t>(least_bytes(needs) / std::max<std::int64_t>(least_blocks(needs), 1), 1);
}

std::vector<std::int64_t> divide_cache(const std::vector<PoolNeed>& needs, std::int64_t max_bytes) {
  const std::int64_t beyond = useful_bytes(needs) - least_bytes(needs), spare = max_bytes - least_bytes(needs);
  std::vector<std::int64_t> blocks;
  for (const PoolNeed& n : needs) {
    const std::int64_t more = n.useful - n.least;
    const auto share =
        static_cast<std::int64_t>(static_cast<long double>(more) * spare / std::max<std::int64_t>(beyond, 1));
    blocks.push_back(spare < 0 ? 0 : n.least + (beyond <= spare ? more : share));
  }
  return blocks;
}

std::vector<BlockPools::Size> pool_sizes(const ModelRunner& runner, const std::vector<std::int64_t>& num_blocks) {
  std::vector<BlockPools::Size> sizes;
  for (const CachePool& pool : runner.cache_pools()) sizes.push_back({num_blocks[sizes.size()], pool.window});
  return sizes;
}

std::int64_t longest_sequence(const ModelRunner& runner, std::int64_t chunk, std::int64_t max_bytes) {
  const std::int64_t block = runner.block_size();
  const auto pools = runner.cache_pools();
  const auto fits = [&](std::int64_t tokens) {
    std::int64_t bytes = 0;
    for (const CachePool& pool : pools) bytes += most_blocks(pool.window, block, tokens, chunk) * pool.bytes_per_block;
    return bytes <= max_bytes;
  };
  // whole blocks and one token: a prompt without the last token then ends with a block, so that no copy is needed
  std::int64_t fitting = -1, beyond = INT32_MAX / block;
  while (fitting + 1 < beyond) {
    const std::int64_t blocks = (fitting + beyond) / 2;
    (fits(blocks * block + 1) ? fitting : beyond) = blocks;
  }
  return std::max<std::int64_t>(fitting * block + 1, 0);
}

}  // namespace nemo_rl::generation
