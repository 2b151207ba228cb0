// Sums over peers: in the order of ranks, the same bits on all of them, whatever way the numbers travel.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>

#include <mutex>

#include "distributed/memory_communicator.h"
#include "distributed/peers.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {
namespace {

Peers peers_of(Communicator& ranks) {
  return Peers(std::shared_ptr<Communicator>(&ranks, [](Communicator*) {}));
}

/// Of every rank other numbers of very different sizes: another order of summation gives other bits.
at::Tensor numbers(at::IntArrayRef shape, int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(rank + 1));
  return at::randn(shape, generator) * at::pow(10.0, at::randint(-4, 5, shape, generator).to(at::kFloat));
}

void expect_sum(int size, at::IntArrayRef shape) {
  auto expected = numbers(shape, 0);
  for (int r = 1; r < size; ++r) expected = expected + numbers(shape, r);
  std::mutex lock;
  on_ranks(size, [&](Communicator& ranks) {
    auto peers = peers_of(ranks);
    const auto x = numbers(shape, ranks.rank());
    peers.sum(x, "test");
    const std::lock_guard guard(lock);
    EXPECT_TRUE(at::equal(x, expected)) << "rank " << ranks.rank() << " of " << size;
  });
}

TEST(Peers, AllReduceAddsInRankOrderOnEveryRank) {
  for (const int size : {2, 3, 4})
    for (const std::int64_t rows : {1, 7}) expect_sum(size, {rows, 12});
}

TEST(Peers, AllReduceOfLargeTensorsIsBitIdenticalToASumInRankOrder) {
  expect_sum(4, {1024, 96});  // parts
  expect_sum(3, {1024, 97});  // cannot be cut into three
  expect_sum(2, {1024, 96});
}

TEST(Peers, GatherReturnsTensorsInRankOrder) {
  std::mutex lock;
  on_ranks(3, [&](Communicator& ranks) {
    auto peers = peers_of(ranks);
    const auto all = peers.gather(at::full({2, 2}, ranks.rank(), at::kDouble), "test");
    const std::lock_guard guard(lock);
    EXPECT_EQ(all.sizes(), at::IntArrayRef({3, 2, 2}));
    for (int r = 0; r < 3; ++r) EXPECT_TRUE(at::equal(all[r], at::full({2, 2}, r, at::kDouble)));
  });
}

}  // namespace
}  // namespace nemo_rl::distributed
