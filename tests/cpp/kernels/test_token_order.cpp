// The integers by which the CUDA sampler orders and adds up tokens (kernels/token_order.h).
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/log_softmax.h"
#include "kernels/token_order.h"

namespace nemo_rl::kernels {

TEST(TokenOrder, IntegerKeysSortLikeTheFloatLogits) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> ascending{-inf, -3e38f, -2.0f, -1.0f, -1e-40f, 0.0f, 1e-40f, 1.0f, 1.0000001f, 3e38f, inf};
  for (std::size_t i = 1; i < ascending.size(); ++i) EXPECT_LT(order_of(ascending[i - 1]), order_of(ascending[i])) << i;
  EXPECT_EQ(order_of(0.0f), order_of(-0.0f));
}

TEST(TokenOrder, SumOfFixedPointProbabilitiesOfAWholeVocabularyFitsIn64Bits) {
  EXPECT_EQ(mass_of(0.0f), 0u);
  EXPECT_LT(mass_of(0.25f), mass_of(0.5f));
  EXPECT_LE(mass_of(1.0f), std::numeric_limits<std::uint64_t>::max() / static_cast<std::uint64_t>(kMaxVocab));
  EXPECT_NEAR(static_cast<double>(mass_of(0.3f)) / static_cast<double>(mass_of(1.0f)), 0.3, 1e-7);
}

TEST(TokenOrder, RandomDrawOfProbabilityMassIsBelowTheTotalMass) {
  const std::uint64_t most = mass_of(1.0f) * static_cast<std::uint64_t>(kMaxVocab);
  for (const std::uint64_t total : {std::uint64_t{1}, std::uint64_t{7}, mass_of(1.0f), most}) {
    EXPECT_EQ(drawn_mass(0.0, total), 0u);
    EXPECT_LT(drawn_mass(0x1.fffffffffffffp-1, total), total);
  }
  EXPECT_EQ(drawn_mass(0.5, 1000), 500u);
}

TEST(TokenOrder, TopPMassIsAtLeastOneUnitAndAtMostTheTotalMass) {
  EXPECT_EQ(needed_mass(0.5f, 1001), 501u);
  EXPECT_EQ(needed_mass(1e-30f, 1001), 1u);
  EXPECT_LE(needed_mass(0.9999999f, 1001), 1001u);
}

}  // namespace nemo_rl::kernels
