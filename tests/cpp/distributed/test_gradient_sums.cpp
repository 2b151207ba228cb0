// The sums of blocks against the tree written out by hand, and their bits over every number of ranks.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "distributed/gradient_sums.h"
#include "distributed/memory_communicator.h"
#include "distributed/shards.h"
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

TEST(BlockSums, GradientBlocksAreAddedInTheOrderOfABinaryTree) {
  std::vector<at::Tensor> b;
  for (int i = 0; i < 7; ++i) b.push_back(block(100, i));
  EXPECT_TRUE(at::equal(sum_of({b[0]}), b[0]));
  EXPECT_TRUE(at::equal(sum_of({b[0], b[1], b[2], b[3]}), (b[0] + b[1]) + (b[2] + b[3])));
  EXPECT_TRUE(at::equal(sum_of(b), ((b[0] + b[1]) + (b[2] + b[3])) + ((b[4] + b[5]) + b[6])));
}

TEST(BlockSums, BinaryTreeSumDiffersInRoundingFromASequentialSum) {
  std::vector<at::Tensor> b;
  for (int i = 0; i < 4; ++i) b.push_back(block(1000, i));
  EXPECT_FALSE(at::equal(sum_of(b), ((b[0] + b[1]) + b[2]) + b[3]));
}

TEST(BlockSums, SumNeedsOneBufferPerLevelOfTheTree) {
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

TEST(BlockSums, ClearDiscardsTheAddedGradientBlocks) {
  BlockSums sums;
  sums.add(at::ones({3}));
  sums.clear();
  EXPECT_EQ(sums.count(), 0);
  EXPECT_TRUE(sums.spare().defined());
  EXPECT_THROW(sums.take(), std::runtime_error);
}

TEST(Shards, ShardsOfAllRanksCoverEveryElementAndBeginAtBlockBoundaries) {
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
at::Tensor sum_on_ranks(int size, std::int64_t n, bool in_place) {
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
    Shards shards({&ranks, [](auto*) {}}, in_place);
    shards.reduce_scatter(flat, 16, "test");
    shards.all_gather(flat, 16, "test");
    flats[static_cast<std::size_t>(ranks.rank())] = flat;
  });
  for (const auto& flat : flats) EXPECT_TRUE(at::equal(flat, flats[0]));
  return flats[0];
}

TEST(ReduceScatter, SumIsBitIdenticalForAnyNumberOfRanks) {
  for (std::int64_t n : {1, 5, 16, 1000, 4099, 300'007}) {
    const auto one = sum_on_ranks(1, n, false);
    for (int size : {2, 4, 8})
      for (const bool in_place : {false, true})
        EXPECT_TRUE(at::equal(sum_on_ranks(size, n, in_place), one))
            << n << " elements, " << size << " ranks, in place: " << in_place;
  }
}

#ifdef __linux__
TEST(PeerMemory, ReadReturnsMemoryOfAnotherRankAndThrowsPeerLostForAnInvalidAddress) {
  on_ranks(2, [](Communicator& ranks) {
    const auto memory = PeerMemory::open(ranks, "test");
    ASSERT_NE(memory, nullptr);
    const auto own = at::full({3}, ranks.rank() + 1.0f);
    const auto addresses = memory->addresses(ranks, own, "test");
    auto other = at::zeros({3});
    memory->read(1 - ranks.rank(), addresses[static_cast<std::size_t>(1 - ranks.rank())], other.data_ptr(), 12, "test");
    EXPECT_TRUE(at::equal(other, at::full({3}, 2.0f - ranks.rank())));
    EXPECT_THROW(memory->read(1 - ranks.rank(), 16, other.data_ptr(), 12, "test"), PeerLost);
    ranks.barrier("test");
  });
}

/// Messages of one rank that say it is another process, as a rank of another machine does.
class ElsewhereCommunicator final : public MemoryCommunicator {
 public:
  using MemoryCommunicator::MemoryCommunicator;
  void all_gather(const at::Tensor& out, const at::Tensor& in, const char* phase) override {
    auto sent = in.clone();
    if (rank() == 1 && in.numel() > 1) sent[0].fill_(1);  // init, whose memory holds other numbers at that address
    MemoryCommunicator::all_gather(out, sent, phase);
  }
};

TEST(PeerMemory, OpenReturnsNullIfARankIsOnAnotherMachine) {
  Meeting meeting(2);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 2; ++rank)
    threads.emplace_back([&, rank] {
      ElsewhereCommunicator ranks(meeting, rank);
      EXPECT_EQ(PeerMemory::open(ranks, "test"), nullptr);
    });
  for (auto& thread : threads) thread.join();
}
#endif

}  // namespace
}  // namespace nemo_rl::distributed
