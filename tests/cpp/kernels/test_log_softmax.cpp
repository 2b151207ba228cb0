#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "common/random.h"
#include "kernels/log_softmax.h"
#define NRL_CAPABILITY vec_under_test
#include "kernels/cpu/vec.h"

namespace nemo_rl::kernels {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<float> random_logits(std::int64_t V, std::uint32_t seed, float scale) {
  std::vector<float> x(V);
  for (std::int64_t v = 0; v < V; ++v) {
    const auto bits = random_bits({seed, RandomStream::init, 0, 0, static_cast<std::uint32_t>(v)});
    double sum = 0;  // four uniforms: near a normal
    for (auto b : bits) sum += b * 0x1.0p-32 - 0.5;
    x[v] = static_cast<float>(sum * scale);
  }
  return x;
}

struct Reference {
  long double log_sum_exp = 0, entropy = 0;
};

Reference reference(const std::vector<float>& x, double temperature) {
  long double max = -kInf, sum = 0, dot = 0;
  for (float v : x) max = std::max(max, v / static_cast<long double>(temperature));
  for (float v : x) {
    const long double d = v / static_cast<long double>(temperature) - max;
    if (std::isinf(d)) continue;
    sum += std::exp(d);
    dot += std::exp(d) * d;
  }
  return {max + std::log(sum), std::log(sum) - dot / sum};
}

}  // namespace

TEST(VecMath, VectorExpIsWithinTwoUlpOfTheExactValue) {
  namespace vec = vec_under_test;
  double worst = 0;
  for (double start = -87.33; start < 88.72; start += 0.0007) {
    float in[16], out[16];
    for (int i = 0; i < 16; ++i) in[i] = static_cast<float>(start + i * 4.1e-5);
    vec::store(out, exp_flushed(vec::load<vec::Floats>(in)));
    for (int i = 0; i < 16; ++i) {
      const double exact = std::exp(static_cast<double>(in[i]));
      const float rounded = static_cast<float>(exact);
      if (!std::isfinite(rounded)) continue;
      worst =
          std::max(worst, std::abs(out[i] - exact) / (std::nextafter(rounded, kInf) - static_cast<double>(rounded)));
    }
  }
  EXPECT_LE(worst, 2.0);
}

TEST(VecMath, VectorExpHandlesZeroInfinityNanAndOutOfRangeInputs) {
  namespace vec = vec_under_test;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float in[16] = {0.0f,    -0.0f,   kInf, -kInf, nan,     88.8f, 1e30f, -1e30f,
                        -87.34f, -100.0f, 1.0f, 88.7f, -87.33f, 0,     0,     0};
  float out[16];
  vec::store(out, exp_flushed(vec::load<vec::Floats>(in)));
  EXPECT_EQ(out[0], 1.0f);
  EXPECT_EQ(out[1], 1.0f);
  EXPECT_EQ(out[2], kInf);
  EXPECT_EQ(out[3], 0.0f);
  EXPECT_TRUE(std::isnan(out[4]));
  EXPECT_EQ(out[5], kInf);
  EXPECT_EQ(out[6], kInf);
  EXPECT_EQ(out[7], 0.0f);
  EXPECT_EQ(out[8], 0.0f);  // subnormal results are flushed
  EXPECT_EQ(out[9], 0.0f);
  EXPECT_NEAR(out[10], 2.7182818f, 3e-7f);
  EXPECT_TRUE(std::isfinite(out[11]));
  EXPECT_GT(out[12], 0.0f);
}

TEST(LogSoftmax, LogSumMatchesAReferenceForEveryRemainderOfTheVectorLength) {
  for (std::int64_t V : {1, 2, 15, 16, 17, 63, 64, 65, 127, 2047, 2048, 2049, 4096, 5000, 49152}) {
    for (float temperature : {1.0f, 0.7f, 3.0f}) {
      const auto x = random_logits(V, 1, 20);
      const auto row = log_sum_exp_row(x.data(), V, temperature, true);
      const auto expected = reference(x, temperature);
      EXPECT_NEAR(row.max + row.log_sum, expected.log_sum_exp, 4e-6) << V;
      EXPECT_NEAR(row.entropy, expected.entropy, 2e-5) << V;
      for (std::int64_t v = 0; v < V; v += 1 + V / 7) {
        const double logprob = x[v] / static_cast<double>(temperature) - static_cast<double>(expected.log_sum_exp);
        EXPECT_NEAR(token_logprob(x[v], temperature, row), logprob, 3e-6 + 2e-7 * std::abs(logprob)) << V;
      }
    }
  }
}

TEST(LogSoftmax, ComputingTheEntropyDoesNotChangeTheMaximumAndTheLogSum) {
  const auto x = random_logits(7777, 2, 10);
  const auto with = log_sum_exp_row(x.data(), 7777, 0.9f, true), without = log_sum_exp_row(x.data(), 7777, 0.9f, false);
  EXPECT_EQ(with.max, without.max);
  EXPECT_EQ(with.log_sum, without.log_sum);
  EXPECT_EQ(without.entropy, 0.0f);
}

TEST(LogSoftmax, CombinedSumsOfVocabularyBlocksAreBitIdenticalToTheSumOfTheWholeRow) {
  const std::int64_t V = 3 * kVocabBlock + 100;
  const auto x = random_logits(V, 3, 10);
  std::vector<VocabBlockSum> blocks;
  for (std::int64_t begin = 0; begin < V; begin += kVocabBlock) {
    blocks.push_back(vocab_block_sum(x.data() + begin, std::min(kVocabBlock, V - begin), 1.3f, true));
  }
  const auto parts = combine_block_sums(blocks.data(), static_cast<std::int64_t>(blocks.size()), true);
  const auto whole = log_sum_exp_row(x.data(), V, 1.3f, true);
  EXPECT_EQ(parts.max, whole.max);
  EXPECT_EQ(parts.log_sum, whole.log_sum);
  EXPECT_EQ(parts.entropy, whole.entropy);
}

TEST(LogSoftmax, TokenWithProbabilityOneHasLogprobZero) {
  std::vector<float> x(5000, -kInf);
  x[4321] = 7.0f;
  const auto row = log_sum_exp_row(x.data(), 5000, 1.0f, true);
  EXPECT_EQ(token_logprob(x[4321], 1.0f, row), 0.0f);
  EXPECT_EQ(token_logprob(x[0], 1.0f, row), -kInf);
  EXPECT_EQ(row.entropy, 0.0f);
}

TEST(LogSoftmax, NonFiniteLogitsGiveANonFiniteLogSum) {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), kInf}) {
    auto x = random_logits(5000, 4, 5);
    x[3000] = bad;
    EXPECT_FALSE(std::isfinite(log_sum_exp_row(x.data(), 5000, 1.0f, false).log_sum));
    std::vector<float> rest(5000, -kInf);  // a NaN in a block of -inf
    rest[0] = 1.0f;
    rest[3000] = bad;
    EXPECT_FALSE(std::isfinite(log_sum_exp_row(rest.data(), 5000, 1.0f, false).log_sum));
  }
  const std::vector<float> none(100, -kInf);
  EXPECT_FALSE(std::isfinite(log_sum_exp_row(none.data(), 100, 1.0f, false).log_sum));
}

TEST(LogSoftmax, SoftmaxSumsToOneAndMatchesTokenLogprob) {
  const auto x = random_logits(1003, 5, 8);
  const auto row = log_sum_exp_row(x.data(), 1003, 0.8f, false);
  std::vector<float> p(1003);
  softmax_row(x.data(), 1003, 0.8f, row, p.data());
  double sum = 0;
  for (int v = 0; v < 1003; ++v) {
    sum += p[v];
    EXPECT_NEAR(p[v], std::exp(static_cast<double>(token_logprob(x[v], 0.8f, row))), 3e-7 * p[v]);
  }
  EXPECT_NEAR(sum, 1.0, 1e-6);
}

TEST(LogSoftmax, Float64VariantAgreesWithFloat32) {
  const auto x = random_logits(3000, 6, 10);
  const std::vector<double> wide(x.begin(), x.end());
  const auto row = log_sum_exp_row_f64(wide.data(), 3000, 0.6, true);
  const auto expected = reference(x, 0.6);
  EXPECT_NEAR(row.max + row.log_sum, expected.log_sum_exp, 1e-11);
  EXPECT_NEAR(row.entropy, expected.entropy, 1e-12);
  EXPECT_NEAR(token_logprob_f64(wide[5], 0.6, row), wide[5] / 0.6 - expected.log_sum_exp, 1e-12);
}

TEST(Softcap, IsWithinAFewUlpOfTheExactValueAtEveryPosition) {
  for (const float c : {1.0f, 30.0f}) {
    auto x = random_logits(10007, 8, 6 * c);
    for (std::size_t v = 0; v < 100; ++v) x[v] = std::ldexp(x[v], -static_cast<int>(v));  // down to very small ones
    auto capped = x;
    softcap_row(capped.data(), 10007, c);
    for (std::size_t v = 0; v < x.size(); ++v) {
      const double exact = c * std::tanh(static_cast<double>(x[v]) / c);
      EXPECT_NEAR(capped[v], exact, 4e-7 * std::fabs(exact) + 1e-45) << x[v];
      float alone = x[v];
      softcap_row(&alone, 1, c);
      EXPECT_EQ(alone, capped[v]);
    }
  }
}

TEST(Softcap, KeepsInfiniteLogitsWithinTheCapAndShowsNan) {
  float x[] = {kInf, -kInf, std::numeric_limits<float>::quiet_NaN(), 0.0f};
  softcap_row(x, 4, 30.0f);
  EXPECT_EQ(x[0], 30.0f);
  EXPECT_EQ(x[1], -30.0f);
  EXPECT_TRUE(std::isnan(x[2]));
  EXPECT_EQ(x[3], 0.0f);
}

#if defined(__x86_64__)
TEST(LogSoftmax, KernelsOfEveryCpuCapabilityAreBitIdentical) {
  const auto x = random_logits(10007, 7, 12);
  const auto expected = base::log_sum_exp_row(x.data(), 10007, 0.9f, true);
  const auto check = [&](LogSumExpRowFn* fn) {
    const auto row = fn(x.data(), 10007, 0.9f, true);
    EXPECT_EQ(row.max, expected.max);
    EXPECT_EQ(row.log_sum, expected.log_sum);
    EXPECT_EQ(row.entropy, expected.entropy);
  };
  auto capped = x;
  base::softcap_row(capped.data(), 10007, 5.0f);
  const auto check_cap = [&](SoftcapRowFn* fn) {
    auto found = x;
    fn(found.data(), 10007, 5.0f);
    EXPECT_EQ(found, capped);
  };
  if (__builtin_cpu_supports("avx2")) check(avx2::log_sum_exp_row), check_cap(avx2::softcap_row);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw"))
    check(avx512::log_sum_exp_row), check_cap(avx512::softcap_row);
}
#endif

}  // namespace nemo_rl::kernels
