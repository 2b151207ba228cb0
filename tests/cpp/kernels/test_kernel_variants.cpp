// A kernel takes the first of its variants whose features are all there: a set, not a step of a ladder.
#include <gtest/gtest.h>

#include "common/cpu_capability.h"

namespace nemo_rl::kernels {
namespace {

const char* chosen(unsigned features) {
  return select_variant<const char>({{needs::amx, "amx"},
                                     {needs::software_tiles, "software_tiles"},
                                     {needs::avx512_bf16, "avx512_bf16"},
                                     {needs::avx512, "avx512"},
                                     {needs::avx2, "avx2"},
                                     {needs::base, "base"}},
                                    features);
}

TEST(KernelVariants, BestVariantWhoseCpuFeaturesAreAllAvailableIsChosen) {
  EXPECT_STREQ(chosen(0), "base");
  EXPECT_STREQ(chosen(kAvx2), "avx2");
  EXPECT_STREQ(chosen(kAvx2 | kAvx512), "avx512");
  EXPECT_STREQ(chosen(kAvx2 | kAvx512 | kPairs), "avx512_bf16");
  EXPECT_STREQ(chosen(kAvx2 | kAvx512 | kPairs | kAmxTiles), "amx");
  EXPECT_STREQ(chosen(kAvx2 | kSoftwareTiles), "software_tiles");
  EXPECT_STREQ(chosen(kAvx2 | kAvx512 | kSoftwareTiles), "software_tiles");
}

TEST(KernelVariants, VariantIsNotChosenIfOneOfItsFeaturesIsMissing) {
  EXPECT_STREQ(chosen(kAvx512 | kPairs), "base");
  EXPECT_STREQ(chosen(kAvx2 | kPairs), "avx2");
  EXPECT_STREQ(chosen(kAvx2 | kAvx512 | kAmxTiles), "avx512");
  EXPECT_STREQ(chosen(kSoftwareTiles), "base");
}

TEST(KernelVariants, SoftwareEmulationOfAmxUsesTheBestAvailableVectorInstructions) {
  const auto of = [](unsigned features) {
    return select_variant<const char>(
        {{needs::software_tiles_avx512, "AVX-512"}, {needs::software_tiles, "AVX2"}, {needs::base, "base"}}, features);
  };
  EXPECT_STREQ(of(kAvx2 | kAvx512 | kSoftwareTiles), "AVX-512");
  EXPECT_STREQ(of(kAvx2 | kSoftwareTiles), "AVX2");
}

TEST(KernelVariants, BestImplementedVariantIsChosenForAKernelThatLacksSomeVariants) {
  EXPECT_STREQ(select_variant<const char>({{needs::avx512, "avx512"}, {needs::base, "base"}}, needs::amx), "avx512");
  EXPECT_STREQ(select_variant<const char>({{needs::avx512, "avx512"}, {needs::base, "base"}}, needs::avx2), "base");
}

TEST(KernelVariants, VariantUsedByThisProcessNeedsOnlyAvailableCpuFeatures) {
  const unsigned features = cpu_features();
  EXPECT_FALSE((features & kAvx512) != 0 && (features & kAvx2) == 0);
  EXPECT_STREQ(chosen(features), cpu_capability_name());
}

}  // namespace
}  // namespace nemo_rl::kernels
