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

TEST(Packing, FirstFitDecreasingPlacesSequencesOfEqualLengthInDescendingIndexOrder) {
  EXPECT_EQ(pack_first_fit_decreasing(Lengths{4, 5, 3, 5, 7, 2}, 10), (Bins{{4, 2}, {3, 1}, {0, 5}}));
}

TEST(Packing, ModifiedFirstFitDecreasingFillsABinWithOneLargeOneMediumAndTwoSmallSequences) {
  EXPECT_EQ(pack_modified_first_fit_decreasing(Lengths{7, 5, 3, 4, 3, 2}, 12), (Bins{{0, 1}, {3, 2, 4, 5}}));
  EXPECT_EQ(pack_modified_first_fit_decreasing(Lengths{7, 3, 3, 4, 2}, 13), (Bins{{0, 1, 2}, {3, 4}}));
}

TEST(Packing, EveryAlgorithmPlacesEverySequenceOnceAndKeepsBinsWithinTheCapacity) {
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

}  // namespace
}  // namespace nemo_rl::batching
