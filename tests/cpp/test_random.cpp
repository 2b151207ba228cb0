#include <gtest/gtest.h>

#include "common/random.h"

namespace nemo_rl {

// Known answers from the Random123 distribution (kat_vectors, philox4x32-10).
TEST(Random, PhiloxMatchesThePublishedTestVectors) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}),
            (std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (std::array<std::uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
}

TEST(Random, UniformNumberIsBelowOneAndDependsOnEveryPartOfTheSamplingKey) {
  const RandomKey key{7, RandomStream::train, 1, 2, 3};
  const double u = random_uniform(key);
  EXPECT_GE(u, 0.0);
  EXPECT_LT(u, 1.0);
  EXPECT_NE(u, random_uniform({8, RandomStream::train, 1, 2, 3}));
  EXPECT_NE(u, random_uniform({7, RandomStream::val, 1, 2, 3}));
  EXPECT_NE(u, random_uniform({7, RandomStream::train, 1ull << 40, 2, 3}));
  EXPECT_NE(u, random_uniform({7, RandomStream::train, 1, 3, 3}));
  EXPECT_NE(u, random_uniform({7, RandomStream::train, 1, 2, 4}));
}

}  // namespace nemo_rl
