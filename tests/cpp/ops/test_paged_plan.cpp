// What the CUDA kernels are asked to do for a step, by hand.
#include <gtest/gtest.h>

#include "ops/paged_plan.h"

namespace nemo_rl::ops {
namespace {

using kernels::AttentionBlock;
using kernels::AttentionRows;
using kernels::AttentionShape;
using kernels::PagedSlice;

/// {first row, tokens, position of the first, where its table begins}
using Block = std::array<std::int64_t, 4>;

std::vector<Block> blocks(const PagedPlan& plan, AttentionRows kind) {
  std::vector<Block> all;
  for (const AttentionBlock& b : plan.of(kind)) all.push_back({b.query_row, b.tokens, b.position, b.block_table});
  return all;
}

using Blocks = std::vector<Block>;
using Slots = std::vector<std::int64_t>;
constexpr std::int64_t kTile = kernels::kKeyTile;

TEST(PagedPlan, EachDecodeTokenGetsASeparateThreadBlockForFewRows) {
  const std::vector<std::int32_t> first = {7, 3}, second = {5};
  const std::vector<PagedSlice> slices = {{0, 1, kTile + 2, first.data(), 2}, {1, 1, 4, second.data(), 1}};
  const auto plan = paged_plan(slices, {4, 2, 16}, 2);
  EXPECT_EQ(plan.slots, (Slots{3 * kTile + 2, 5 * kTile + 4}));
  EXPECT_EQ(plan.block_tables, (std::vector<std::int32_t>{7, 3, 5}));
  EXPECT_EQ(blocks(plan, AttentionRows::few), (Blocks{{0, 1, kTile + 2, 0}, {1, 1, 4, 2}}));
  EXPECT_TRUE(blocks(plan, AttentionRows::many).empty());
}

TEST(PagedPlan, PaddingRowsGetAnEmptyThreadBlockAndNoKvCacheSlot) {
  const std::vector<std::int32_t> table = {2};
  const std::vector<PagedSlice> slices = {{0, 1, 9, table.data(), 1}};
  const auto plan = paged_plan(slices, {4, 2, 16}, 4);
  EXPECT_EQ(plan.slots, (Slots{2 * kTile + 9, -1, -1, -1}));
  EXPECT_EQ(blocks(plan, AttentionRows::few), (Blocks{{0, 1, 9, 0}, {1, 0, 0, 0}, {2, 0, 0, 0}, {3, 0, 0, 0}}));
}

TEST(PagedPlan, PromptIsSplitIntoThreadBlocksForManyRows) {
  const std::vector<std::int32_t> prompt = {0, 1}, other = {4};
  // 40 tokens of 2 heads a group are 80 rows; 64 rows, 32 tokens, make a block
  const std::vector<PagedSlice> slices = {{0, 40, 3, prompt.data(), 2}, {40, 1, 20, other.data(), 1}};
  const auto plan = paged_plan(slices, {2, 1, 64}, 41);
  EXPECT_EQ(blocks(plan, AttentionRows::many), (Blocks{{0, 32, 3, 0}, {32, 8, 35, 0}}));
  EXPECT_EQ(blocks(plan, AttentionRows::few), (Blocks{{40, 1, 20, 2}}));
  for (std::int64_t t = 0; t < 40; ++t) EXPECT_EQ(plan.slots[static_cast<std::size_t>(t)], 3 + t) << t;
  EXPECT_EQ(plan.slots[40], 4 * kTile + 20);
}

TEST(PagedPlan, GroupsOfManyQueryHeadsUseThreadBlocksForManyRows) {
  const std::vector<std::int32_t> table = {0};
  const std::vector<PagedSlice> slices = {{0, 1, 0, table.data(), 1}};
  const auto plan = paged_plan(slices, {16, 1, 64}, 2);
  EXPECT_TRUE(blocks(plan, AttentionRows::few).empty());
  EXPECT_EQ(blocks(plan, AttentionRows::many), (Blocks{{0, 1, 0, 0}, {1, 0, 0, 0}}));
}

}  // namespace
}  // namespace nemo_rl::ops
