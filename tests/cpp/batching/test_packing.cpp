#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "batching/dynamic_batching.h"
#include "batching/packing.h"
#include "common/random.h"

namespace nemo_rl::batching {
namespace {

using Lengths = std::vector<std::int64_t>;

std::int64_t load(const Lengths& lengths, const std::vector<std::int64_t>& bin) {
  return std::accumulate(bin.begin(), bin.end(), std::int64_t{0},
                         [&](std::int64_t sum, std::int64_t i) { return sum + lengths[static_cast<std::size_t>(i)]; });
}

TEST(Packing, FirstFitDecreasingPlacesEqualLengthsByLargerIndex) {
  EXPECT_EQ(pack_first_fit_decreasing(Lengths{4, 5, 3, 5, 7, 2}, 10), (Bins{{4, 2}, {3, 1}, {0, 5}}));
}

TEST(Packing, ModifiedFirstFitDecreasingGivesALargeItsMediumThenTwoSmalls) {
  EXPECT_EQ(pack_modified_first_fit_decreasing(Lengths{7, 5, 3, 4, 3, 2}, 12), (Bins{{0, 1}, {3, 2, 4, 5}}));
  EXPECT_EQ(pack_modified_first_fit_decreasing(Lengths{7, 3, 3, 4, 2}, 13), (Bins{{0, 1, 2}, {3, 4}}));
}

TEST(Packing, EveryIndexOnceAndNoBinOverCapacity) {
  for (std::uint64_t round = 0; round < 200; ++round) {
    Lengths lengths(round);
    for (std::size_t i = 0; i < lengths.size(); ++i)
      lengths[i] = 1 + static_cast<std::int64_t>(
                           random_uniform({1, RandomStream::pack, round, 0, static_cast<std::uint32_t>(i)}) * 97);
    for (const Bins& bins : {pack_first_fit_decreasing(lengths, 100), pack_modified_first_fit_decreasing(lengths, 100),
                             pack_concatenative(lengths, 100, 3)}) {
      Lengths seen;
      for (const auto& bin : bins) {
        EXPECT_LE(load(lengths, bin), 100);
        seen.insert(seen.end(), bin.begin(), bin.end());
      }
      std::sort(seen.begin(), seen.end());
      Lengths all(lengths.size());
      std::iota(all.begin(), all.end(), 0);
      EXPECT_EQ(seen, all);
    }
  }
}

TEST(Packing, BinCountIsRaisedFromTheFullestBins) {
  EXPECT_EQ(adjust_bin_count({{0, 1, 2}, {3, 4}}, 0, 4), (Bins{{0}, {3, 4}, {2}, {1}}));
  EXPECT_EQ(adjust_bin_count({{0, 1}, {2, 3}}, 3, 1), (Bins{{0, 1}, {2}, {3}}));  // a tie: the later bin gives
  EXPECT_THROW(adjust_bin_count({{0, 1}}, 3, 1), std::invalid_argument);
  EXPECT_EQ(adjust_bin_count({}, 0, 4), Bins{});
}

TEST(Packing, ConcatenativeKeepsOrderAndCountLimit) {
  EXPECT_EQ(pack_concatenative(Lengths{1, 1, 1, 1}, 10, 3), (Bins{{0, 1, 2}, {3}}));
  EXPECT_THROW(pack_concatenative(Lengths{11}, 10, -1), std::invalid_argument);
}

TEST(DynamicBatching, RowsAreDealtByLengthAndKeptWithinTheBudget) {
  // sorted: rows 1(1) 3(2) 0(3) 2(8); shard 0: 1, 0; shard 1: 3, 2. Places: max(1,2)->4, max(3,8)->8
  const auto plan = plan_dynamic_batching(Lengths{3, 1, 8, 2}, {4, 2, 8, 4, 8});
  EXPECT_EQ(plan.order, (Lengths{1, 0, 3, 2}));
  using Spans = std::vector<std::array<std::int64_t, 2>>;
  EXPECT_EQ(plan.micro_batch_indices, (std::vector<Spans>{{{0, 1}, {1, 2}}}));
  EXPECT_EQ(plan.micro_batch_lengths, (std::vector<Lengths>{{4, 8}}));
  EXPECT_THROW(plan_dynamic_batching(Lengths{9}, {1, 1, 8, 1, 16}), std::invalid_argument);
}

}  // namespace
}  // namespace nemo_rl::batching
