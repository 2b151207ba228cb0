#include <gtest/gtest.h>

#include "generation/block_manager.h"

namespace nemo_rl::generation {

TEST(BlockManager, ExtendAllocatesOnlyMissingBlocks) {
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

TEST(BlockManager, ForkSharesFullBlocksAndCopiesThePartialOne) {
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

TEST(BlockManager, ReleasingABlockTwiceThrows) {
  BlockManager blocks(2, 8);
  BlockTable table;
  ASSERT_TRUE(blocks.extend(table, 1));
  BlockTable copy = table;
  blocks.release(table);
  EXPECT_THROW(blocks.release(copy), std::runtime_error);
}

}  // namespace nemo_rl::generation
