// Sums beside a backward against the sums behind it, to the bit: any number of ranks, of blocks and of buckets.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>

#include "distributed/gradient_exchange.h"
#include "distributed/memory_communicator.h"
#include "distributed/shards.h"
#include "runtime/large_tensor.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {
namespace {

constexpr std::int64_t kBlock = 16, kTotal = 5'000'011;
const std::vector<std::int64_t> kStarts = {0, 1'200'000, 1'200'500, 2'500'000, 4'999'000};

std::vector<at::Tensor> terms_of(int rank, int count) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(100 * rank + count));
  std::vector<at::Tensor> terms;
  for (int i = 0; i < count; ++i) {
    auto term = runtime::empty_large({kTotal}, at::kFloat);
    const auto some = at::empty({99'991}).normal_(0, std::pow(10.0, i % 3), generator);
    term.copy_(some.repeat({kTotal / some.numel() + 1}).narrow(0, 0, kTotal));
    terms.push_back(term);
  }
  return terms;
}

/// This rank's shard of the sum, as it is formed after a backward.
at::Tensor plain(Communicator& ranks, int count) {
  BlockSums sums;
  for (auto& term : terms_of(ranks.rank(), count)) sums.add(term);
  const auto flat = sums.take();
  Shards({&ranks, [](auto*) {}}).reduce_scatter(flat, kBlock, "test");
  const auto shard = shard_of(kTotal, ranks.rank(), ranks.size(), kBlock);
  return flat.narrow(0, shard.begin, shard.size());
}

/// The subtrees of all blocks but the last one, and that one.
std::vector<at::Tensor> subtrees(int rank, int count) {
  auto terms = terms_of(rank, count);
  BlockSums sums;
  for (int i = 0; i + 1 < count; ++i) sums.add(terms[static_cast<std::size_t>(i)]);
  auto found = sums.take_subtrees();
  EXPECT_EQ(sums.count(), 0);
  found.push_back(terms.back());
  return found;
}

TEST(GradientExchange, ReduceScatterDuringTheBackwardPassIsBitIdenticalToOneAfterIt) {
  for (const auto& [size, count] : {std::pair{2, 1}, {2, 4}, {3, 2}, {4, 3}})
    on_ranks(size, [count = count](Communicator& given) {
      const std::shared_ptr<Communicator> ranks(&given, [](auto*) {});
      const auto wanted = plain(given, count);
      GradientExchange exchange(ranks, kStarts, kTotal, kBlock);
      for (const bool give_up_memory : {false, true}) {
        auto terms = subtrees(given.rank(), count);
        const auto sum = at::empty_like(wanted);
        exchange.begin({terms, sum, give_up_memory});
        EXPECT_TRUE(exchange.is_running());
        for (auto begin = kTotal; begin > 0; begin -= 700'000 + 100'000 * given.rank()) exchange.final_from(begin);
        const auto round = exchange.finish();
        EXPECT_FALSE(exchange.is_running());
        EXPECT_TRUE(at::equal(round.sum, wanted));
        if (give_up_memory)
          for (const auto& term : terms) EXPECT_EQ(term.abs().sum().item<float>(), 0);
      }
    });
}

TEST(GradientExchange, InPlaceReduceScatterIsBitIdenticalToOneAfterTheBackwardPass) {
  on_ranks(2, [](Communicator& given) {
    const std::shared_ptr<Communicator> ranks(&given, [](auto*) {});
    const auto wanted = plain(given, 2);
    const auto shard = shard_of(kTotal, given.rank(), 2, kBlock);
    auto terms = subtrees(given.rank(), 2);
    GradientExchange exchange(ranks, kStarts, kTotal, kBlock);
    exchange.begin({terms, terms[0].narrow(0, shard.begin, shard.size())});
    EXPECT_TRUE(at::equal(exchange.finish().sum, wanted));
    EXPECT_TRUE(at::equal(terms[0].narrow(0, shard.begin, shard.size()), wanted));
  });
}

class Lost final : public Communicator {
 public:
  Lost() : Communicator(0, 2) {}
  void all_to_all(const at::Tensor&, const at::Tensor&, const char* phase) override { lose(phase); }
  void all_gather(const at::Tensor&, const at::Tensor&, const char* phase) override { lose(phase); }
  void broadcast(const at::Tensor&, int, const char* phase) override { lose(phase); }
  void send(const at::Tensor&, int, const char* phase) override { lose(phase); }
  void receive(const at::Tensor&, int, const char* phase) override { lose(phase); }
  void barrier(const char* phase) override { lose(phase); }

 private:
  [[noreturn]] void lose(const char* phase) { throw PeerLost(0, phase, 0, "gone"); }
};

TEST(GradientExchange, FinishThrowsPeerLostIfARankIsLost) {
  GradientExchange exchange(std::make_shared<Lost>(), kStarts, kTotal, kBlock);
  const auto terms = terms_of(0, 1);
  const auto sum = at::empty({shard_of(kTotal, 0, 2, kBlock).size()});
  for (int again = 0; again < 2; ++again) {
    exchange.begin({terms, sum, true});
    for (const auto begin : {kTotal - 1, kTotal / 2, std::int64_t{1}}) exchange.final_from(begin);  // no wait for ever
    EXPECT_THROW(exchange.finish(), PeerLost);
  }
}

TEST(GradientExchange, BeginThrowsWhileAnExchangeRunsAndTheDestructorEndsTheExchange) {
  const auto terms = terms_of(0, 1);
  GradientExchange exchange(std::make_shared<Lost>(), kStarts, kTotal, kBlock);
  exchange.begin({terms, at::empty({shard_of(kTotal, 0, 2, kBlock).size()})});
  EXPECT_THROW(exchange.begin({terms, at::empty({1})}), std::runtime_error);
}

TEST(ReleaseTensorMemory, ReleasedMemoryReadsAsZeroEvenInPartialPages) {
  for (const auto& [size, begin, length] :
       {std::tuple{3'000'000, 0, 3'000'000}, {3'000'000, 777, 2'100'001}, {100, 3, 50}}) {
    const auto whole = runtime::empty_large({size}, at::kFloat);
    whole.fill_(1);
    runtime::give_up(whole.narrow(0, begin, length));
    EXPECT_EQ(whole.sum().item<double>(), size - length);
    EXPECT_EQ(whole.narrow(0, begin, length).abs().max().item<float>(), 0);
    whole.narrow(0, begin, length).fill_(2);
    EXPECT_EQ(whole.narrow(0, begin, length).mean().item<float>(), 2);
  }
}

}  // namespace
}  // namespace nemo_rl::distributed
