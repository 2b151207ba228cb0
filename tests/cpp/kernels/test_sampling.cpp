#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "common/random.h"
#include "kernels/sampling.h"

namespace nemo_rl::kernels {
namespace {

struct Scratch {
  explicit Scratch(std::int64_t V) : candidates(V), logits(V), ids(V) {}
  FilterScratch view() { return {candidates.data(), logits.data(), ids.data()}; }
  std::vector<FilterCandidate> candidates;
  std::vector<float> logits;
  std::vector<std::int32_t> ids;
};

std::vector<float> row_of(std::int64_t V, std::uint32_t seed) {
  std::vector<float> x(V);
  for (std::int64_t v = 0; v < V; ++v) {
    const auto bits = random_bits({seed, RandomStream::init, 0, 0, static_cast<std::uint32_t>(v)});
    double sum = 0;
    for (auto b : bits) sum += b * 0x1.0p-32 - 0.5;
    x[v] = static_cast<float>(sum * 8);
  }
  return x;
}

const std::vector<SamplingRule> kRules = {{1, 1, 0, false},  {0.6f, 1, 0, false},  {1, 0.9f, 0, false},
                                          {1, 1, 40, false}, {1, 0.8f, 40, false}, {2, 0.999f, 0, false},
                                          {1, 1, 0, true}};

}  // namespace

TEST(Sampling, TopKReturnsTheLargestLogitsInVocabularyOrder) {
  const auto x = row_of(3000, 1);
  Scratch scratch(3000);
  const std::int64_t n = filter_row(x.data(), 3000, {1, 1, 40, false}, scratch.view());
  ASSERT_EQ(n, 40);
  EXPECT_TRUE(std::is_sorted(scratch.ids.begin(), scratch.ids.begin() + n));
  auto sorted = x;
  std::nth_element(sorted.begin(), sorted.begin() + 39, sorted.end(), std::greater<>());
  for (std::int64_t i = 0; i < n; ++i) {
    EXPECT_EQ(scratch.logits[i], x[scratch.ids[i]]);
    EXPECT_GE(scratch.logits[i], sorted[39]);
  }
}

TEST(Sampling, SampledTokenIdGrowsWithTheUniformRandomNumber) {
  const auto x = row_of(5000, 2);
  Scratch scratch(5000);
  for (const auto& rule : kRules) {
    if (rule.greedy) continue;
    std::int64_t last = -1;
    for (int i = 0; i < 500; ++i) {
      const auto s = sample_row(x.data(), 5000, rule, i / 500.0, scratch.view(), false);
      ASSERT_GE(s.token, last);
      last = s.token;
    }
    EXPECT_GT(last, 2500);
  }
}

TEST(Sampling, LogprobsOfSamplingAndScoringAreBitIdentical) {
  Scratch scratch(49152);
  for (std::uint32_t seed = 0; seed < 20; ++seed) {
    const std::int64_t V = seed % 2 ? 49152 : 777;
    const auto x = row_of(V, seed);
    for (const auto& rule : kRules) {
      const auto sampled = sample_row(x.data(), V, rule, seed / 20.0, scratch.view(), true);
      const auto scored = score_row(x.data(), V, rule, sampled.token, scratch.view(), true);
      EXPECT_EQ(sampled.logprob, scored.logprob);
      EXPECT_EQ(sampled.entropy, scored.entropy);
      if (rule.filters(V) || rule.greedy) continue;  // the trainer's way without a filter
      EXPECT_EQ(sampled.logprob, token_logprob(x[sampled.token], rule.temperature,
                                               log_sum_exp_row(x.data(), V, rule.temperature, false)));
    }
  }
}

#if defined(__x86_64__)
TEST(Sampling, KernelsOfEveryCpuCapabilityAreBitIdentical) {
  const std::int64_t V = 10007;
  const auto x = row_of(V, 3);
  Scratch scratch(V);
  const auto check = [&](SampleRowFn* fn) {
    for (const auto& rule : kRules) {
      for (double u : {0.0, 0.3, 0.77, 0.9999999}) {
        const auto expected = base::sample_row(x.data(), V, rule, u, scratch.view(), true),
                   got = fn(x.data(), V, rule, u, scratch.view(), true);
        EXPECT_EQ(got.token, expected.token);
        EXPECT_EQ(got.logprob, expected.logprob);
        EXPECT_EQ(got.entropy, expected.entropy);
      }
    }
  };
  if (__builtin_cpu_supports("avx2")) check(avx2::sample_row);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) check(avx512::sample_row);
}
#endif

}  // namespace nemo_rl::kernels
