#include <gtest/gtest.h>

#include <algorithm>

#include "generation/cache_size.h"

namespace nemo_rl::generation {

TEST(BlockManager, ExtendAllocatesOnlyTheMissingKvCacheBlocks) {
  BlockManager blocks(4, 8);
  BlockTable table;
  ASSERT_TRUE(blocks.extend(table, 9));
  EXPECT_EQ(table.size(), 2u);
  ASSERT_TRUE(blocks.extend(table, 16));
  EXPECT_EQ(table.size(), 2u);
  EXPECT_FALSE(blocks.extend(table, 33));  // five blocks, of four
  EXPECT_EQ(table.size(), 2u);
  EXPECT_EQ(blocks.num_free(), 2);
}

TEST(BlockManager, ForkSharesFullBlocksAndCopiesThePartialBlock) {
  BlockManager blocks(6, 8);
  BlockTable prompt;
  ASSERT_TRUE(blocks.extend(prompt, 19));  // 8 + 8 + 3
  std::vector<BlockCopy> copies;
  BlockTable fork = blocks.fork(prompt, 19, copies);
  EXPECT_EQ(fork[0], prompt[0]);
  EXPECT_EQ(fork[1], prompt[1]);
  EXPECT_NE(fork[2], prompt[2]);
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_EQ(copies[0].from, prompt[2]);
  EXPECT_EQ(copies[0].to, fork[2]);
  EXPECT_EQ(copies[0].length, 3);
  EXPECT_EQ(blocks.references(prompt[0]), 2);
  EXPECT_EQ(blocks.references(prompt[2]), 1);

  blocks.release(prompt);
  EXPECT_EQ(blocks.num_free(), 3);  // the shared ones live on
  blocks.release(fork);
  EXPECT_EQ(blocks.num_free(), 6);
}

TEST(BlockManager, ForkOfFullBlocksCopiesNothing) {
  BlockManager blocks(2, 8);
  BlockTable prompt;
  ASSERT_TRUE(blocks.extend(prompt, 16));
  std::vector<BlockCopy> copies;
  BlockTable fork = blocks.fork(prompt, 16, copies);
  EXPECT_TRUE(copies.empty());
  EXPECT_EQ(fork, prompt);
}

TEST(BlockManager, BlockIsReleasedOnceItLiesOutsideTheSlidingWindowOfTheNextToken) {
  for (const std::int64_t window : {1, 2, 3, 8, 9, 20}) {
    BlockManager blocks(16, 8, window);
    BlockTable table;
    for (std::int64_t cached = 1; cached <= 100; ++cached) {
      ASSERT_TRUE(blocks.extend(table, cached));
      blocks.release_unread(table, cached);
      // the token at position `cached` reads cached - window + 1 ..; the last cached position always stays
      const std::int64_t first_read = std::min(cached - window + 1, cached - 1);
      for (std::int64_t i = 0; i < blocks.blocks_for(cached); ++i)
        ASSERT_EQ(table[static_cast<std::size_t>(i)] != kNoBlock, 8 * i + 7 >= first_read)
            << "block " << i << " after " << cached << " tokens with a window of " << window;
      ASSERT_EQ(blocks.num_used(), std::count_if(table.begin(), table.end(), [](auto b) { return b != kNoBlock; }));
      ASSERT_LE(blocks.num_used(), most_blocks(window, 8, cached, 1));
    }
    blocks.release(table);
    EXPECT_EQ(blocks.num_free(), 16);
  }
}

TEST(BlockManager, ForkSharesOnlyBlocksThatTheSlidingWindowStillReads) {
  BlockManager blocks(6, 8, 5);
  BlockTable prompt;
  ASSERT_TRUE(blocks.extend(prompt, 27));
  blocks.release_unread(prompt, 27);  // positions 23.. are read
  std::vector<BlockCopy> copies;
  BlockTable fork = blocks.fork(prompt, 27, copies);
  EXPECT_EQ(fork[1], kNoBlock);
  EXPECT_EQ(fork[2], prompt[2]);
  EXPECT_EQ(copies.size(), 1u);
  blocks.release_unread(prompt, 40);
  EXPECT_EQ(blocks.references(fork[2]), 1) << "the fork still reads it";
  blocks.release(fork);
  EXPECT_EQ(blocks.num_free(), 6);
}

TEST(BlockPools, MaximumNumberOfBlocksCoversTheSlidingWindowAndOneStep) {
  EXPECT_EQ(most_blocks(0, 32, 8192, 512), 256);
  EXPECT_EQ(most_blocks(512, 32, 8192, 1), 17);    // 512 positions, from the last of a block on
  EXPECT_EQ(most_blocks(512, 32, 8192, 512), 33);  // 1,023 positions
  EXPECT_EQ(most_blocks(512, 32, 300, 512), 10) << "all fit in the window";
}

TEST(BlockPools, ExtendAllocatesInAllPoolsOrInNone) {
  BlockPools pools({{4, 0}, {2, 8}}, 8);
  BlockTables tables;
  EXPECT_FALSE(pools.extend(tables, 24));
  EXPECT_TRUE(tables.empty());
  ASSERT_TRUE(pools.extend(tables, 16));
  pools.release_unread(tables, 16);  // position 16 reads 9..
  ASSERT_TRUE(pools.extend(tables, 24));
  EXPECT_EQ(tables[1][2], 0) << "the released block is used again";
  EXPECT_FALSE(pools.extend(tables, 40)) << "five blocks of the first pool";
  pools.release(tables);
  EXPECT_EQ(pools.num_used(), 0);
}

TEST(CacheSize, MemoryBeyondTheMinimumIsDividedOverThePoolsInProportionToTheirNeeds) {
  const std::vector<PoolNeed> needs = {{{0, 10}, 4, 100}, {{8, 50}, 2, 22}};  // 140 of 2,100 bytes
  EXPECT_EQ(divide_cache(needs, 2100), (std::vector<std::int64_t>{100, 22}));
  EXPECT_EQ(divide_cache(needs, 1120), (std::vector<std::int64_t>{52, 12}));  // half of those beyond
  EXPECT_EQ(divide_cache(needs, 140), (std::vector<std::int64_t>{4, 2}));
  EXPECT_EQ(divide_cache(needs, 139), (std::vector<std::int64_t>{0, 0}));
  EXPECT_EQ(divide_cache({{{0, 10}, 4, 100}}, 567), (std::vector<std::int64_t>{56})) << "one pool gets all";
}

TEST(BlockManager, ReleasingABlockTwiceThrows) {
  BlockManager blocks(2, 8);
  BlockTable table;
  ASSERT_TRUE(blocks.extend(table, 1));
  BlockTable copy = table;
  blocks.release(table);
  EXPECT_THROW(blocks.release(copy), std::runtime_error);
}

}  // namespace nemo_rl::generation
