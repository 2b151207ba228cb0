// The sums of blocks against the tree written out by hand, and their bits over every number of ranks.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "distributed/gradient_sums.h"
#include "distributed/memory_communicator.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {
namespace {

/// Numbers of very different sizes, so that another order of summation gives other bits.
at::Tensor block(std::int64_t n, int seed) {
  at::manual_seed(static_cast<std::uint64_t>(seed));
  return at::randn({n}) * at::pow(10.0, at::randint(-4, 5, {n}).to(at::kFloat));
}

at::Tensor sum_of(const std::vector<at::Tensor>& blocks) {
  BlockSums sums;
  for (const auto& b : blocks) sums.add(b.clone());
  return sums.take();
}

TEST(BlockSums, AddsAlongTheTree) {
  std::vector<at::Tensor> b;
  for (int i = 0; i < 7; ++i) b.push_back(block(100, i));
  EXPECT_TRUE(at::equal(sum_of({b[0]}), b[0]));
  EXPECT_TRUE(at::equal(sum_of({b[0], b[1], b[2], b[3]}), (b[0] + b[1]) + (b[2] + b[3])));
  EXPECT_TRUE(at::equal(sum_of(b), ((b[0] + b[1]) + (b[2] + b[3])) + ((b[4] + b[5]) + b[6])));
}

TEST(BlockSums, AnotherOrderGivesOtherBits) {
  std::vector<at::Tensor> b;
  for (int i = 0; i < 4; ++i) b.push_back(block(1000, i));
  EXPECT_FALSE(at::equal(sum_of(b), ((b[0] + b[1]) + b[2]) + b[3]));
}

TEST(BlockSums, NeedsOneBufferALevel) {
  BlockSums sums;
  int made = 0;
  for (int i = 0; i < 64; ++i) {
    auto next = sums.spare();
    if (!next.defined()) next = at::empty({8}), ++made;
    next.fill_(1.0);
    sums.add(next);
  }
  EXPECT_EQ(made, 7);  // log2(64) + 1
  EXPECT_TRUE(at::equal(sums.take(), at::full({8}, 64.0)));
  EXPECT_EQ(sums.count(), 0);
}

TEST(BlockSums, ClearForgets) {
  BlockSums sums;
  sums.add(at::ones({3}));
  sums.clear();
  EXPECT_EQ(sums.count(), 0);
  EXPECT_TRUE(sums.spare().defined());
  EXPECT_THROW(sums.take(), std::runtime_error);
}

TEST(Shards, AreWholeBlocksAndCoverAll) {
  for (int size : {1, 2, 3, 4, 7})
    for (std::int64_t total : {1, 16, 17, 100, 1000}) {
      std::int64_t end = 0;
      for (int r = 0; r < size; ++r) {
        const auto s = shard_of(total, r, size, 16);
        EXPECT_EQ(s.begin, end);
        EXPECT_TRUE(s.begin % 16 == 0 || s.size() == 0);
        end = s.end;
      }
      EXPECT_EQ(end, total);
    }
}

/// The whole sum as `size` ranks form it from 8 blocks.
at::Tensor sum_on_ranks(int size, std::int64_t n) {
  std::vector<at::Tensor> flats(static_cast<std::size_t>(size));
  on_ranks(size, [&](Communicator& ranks) {
    BlockSums sums;
    for (int i = 0; i < 8 / size; ++i) {
      at::Tensor own;
      {
        static std::mutex one_generator;
        const std::lock_guard lock(one_generator);
        own = block(n, ranks.rank() * (8 / size) + i);
      }
      sums.add(own);
    }
    const auto flat = sums.take();
    reduce_scatter(ranks, flat, 16, "test");
    all_gather_shards(ranks, flat, 16, "test");
    flats[static_cast<std::size_t>(ranks.rank())] = flat;
  });
  for (const auto& flat : flats) EXPECT_TRUE(at::equal(flat, flats[0]));
  return flats[0];
}

TEST(ReduceScatter, BitsDoNotDependOnTheNumberOfRanks) {
  for (std::int64_t n : {1, 5, 16, 1000, 4099}) {
    const auto one = sum_on_ranks(1, n);
    for (int size : {2, 4, 8})
      EXPECT_TRUE(at::equal(sum_on_ranks(size, n), one)) << n << " elements, " << size << " ranks";
  }
}

}  // namespace
}  // namespace nemo_rl::distributed
