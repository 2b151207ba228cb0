// Miniatures of a model, and times of its passes.
#include <gtest/gtest.h>

#include <algorithm>

#include "forecast/pass_times.h"
#include "generation/small_model.h"

namespace nemo_rl::forecast {
namespace {

/// 12 layers, of which the first `windows` have a sliding window.
model::ModelConfig config_with_windows(std::size_t windows) {
  auto c = small_config(true);
  c.layers.resize(12);
  for (std::size_t l = 0; l < windows; ++l) c.layers[l].window = 8;
  return c;
}

std::ptrdiff_t windows_of(const model::ModelConfig& c) {
  return std::ranges::count_if(c.layers, [](const auto& l) { return l.window > 0; });
}

TEST(Miniature, HasTheKindsOfLayersAndTheVocabularyInProportion) {
  const auto [config, scale] = miniature(config_with_windows(10), 1);
  EXPECT_EQ(config.layers.size(), 6u);
  EXPECT_EQ(windows_of(config), 5);
  EXPECT_EQ(scale, 2);
  EXPECT_EQ(config.vocab_size, 66);  // 131 / 2, rounded
}

TEST(Miniature, LacksAKindOfFewerThanATenthOfTheLayers) {
  const auto [config, scale] = miniature(config_with_windows(11), 1);
  EXPECT_EQ(config.layers.size(), 1u);
  EXPECT_EQ(windows_of(config), 1);
  EXPECT_EQ(scale, 12);
}

TEST(Miniature, IsTheWholeModelIfThatIsSmall) {
  const auto [config, scale] = miniature(config_with_windows(10), 1e9);
  EXPECT_EQ(config.layers.size(), 12u);
  EXPECT_EQ(scale, 1);
  EXPECT_EQ(config.vocab_size, 131);
}

TEST(PassTimes, HaveEveryPassThatIsAskedFor) {
  for (const bool adapts : {false, true}) {
    Passes passes{.dtype = at::kBFloat16, .scores = true, .length = 24, .micro_batch = 96, .trained = 0.5};
    if (adapts) passes.lora = model::LoraConfig{4, 8, {"q_proj", "down_proj"}, false};
    passes.decode = {{4, 40, 10, 2}, {1, 1, 0, 1}};
    const auto t = pass_times(small_config(false), passes);
    for (const double time : {t.prefill, t.score, t.forward, t.backward, t.update}) EXPECT_GT(time, 0);
    ASSERT_EQ(t.decode.size(), 2u);
    EXPECT_GT(t.decode[0], 0);
    EXPECT_GT(t.decode[1], 0);
  }
}

}  // namespace
}  // namespace nemo_rl::forecast
