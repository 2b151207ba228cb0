// The arithmetic that the CPU and CUDA kernels share, on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/clipped_pg_loss.h"
#include "kernels/gae.h"
#include "kernels/gae_scan.h"
#include "kernels/masked_reduce.h"

namespace nemo_rl::kernels {
namespace {

TEST(ElementwiseMath, ExpIsAccurateAndExactAtZeroAndInfinity) {
  for (double x = -100; x <= 85; x += 0.0137) {
    EXPECT_NEAR(exp_of(x) / std::exp(x), 1.0, 1e-15) << x;
    const float f = static_cast<float>(x), e = static_cast<float>(std::exp(static_cast<double>(f)));
    if (e > 1e-37f) EXPECT_NEAR(exp_of(f) / e, 1.0f, 3e-7f) << x;
  }
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(exp_of(0.0f), 1.0f);
  EXPECT_EQ(exp_of(inf), inf);
  EXPECT_EQ(exp_of(-inf), 0.0f);
  EXPECT_EQ(exp_of(100.0f), inf);
  EXPECT_TRUE(std::isnan(exp_of(std::nanf(""))));
  EXPECT_EQ(exp_of(710.0), std::numeric_limits<double>::infinity());
  EXPECT_EQ(exp_of(-746.0), 0.0);
}

TEST(ElementwiseMath, KlTermsOfNearlyEqualLogprobsKeepFullPrecision) {
  for (const float r : {1e-6f, -1e-4f, 1e-3f, 0.01f, -0.3f, 0.49f, 0.51f, 3.0f}) {
    const double exact = std::fabs(r) < 1e-2
                             ? r * static_cast<double>(r) / 2 * (1 + r / 3.0 * (1 + r / 4.0 * (1 + r / 5.0)))
                             : std::expm1(static_cast<double>(r)) - r;
    EXPECT_NEAR(exp_minus_linear(r, exp_of(r)) / exact, 1.0, 1e-6) << r;
    const double a = std::fabs(r), e = exp_of(a);
    EXPECT_NEAR(log_cosh_half(a, 1 / e, exp_minus_linear(a, e)) / std::log1p(std::pow(std::sinh(a / 2), 2)) * 2, 1.0,
                1e-12)
        << r;
  }
  EXPECT_EQ(log_cosh_half(1e4, 0.0, exp_of(1e4)), 5000 - std::log(2.0));
}

TEST(ClippedTerm, OverflowingClippedRatioHasNoGradient) {
  const double inf = std::numeric_limits<double>::infinity();
  const PolicyTerm<double> up = policy_term(RatioMode::ppo, 1e4, 0.0, 2.0, 0.8, 1.2, false, 0.0);
  EXPECT_EQ(up.loss, -2.4);
  EXPECT_EQ(up.grad, 0.0);
  const PolicyTerm<double> down = policy_term(RatioMode::ppo, 1e4, 0.0, -2.0, 0.8, 1.2, false, 0.0);
  EXPECT_EQ(down.loss, inf);
  EXPECT_FALSE(is_finite(down.grad));
  const PolicyTerm<double> dual = policy_term(RatioMode::ppo, 1e4, 0.0, -2.0, 0.8, 1.2, true, 3.0);
  EXPECT_EQ(dual.loss, 6.0);
  EXPECT_EQ(dual.grad, 0.0);
}

TEST(PolicyLossTerms, OverflowingRatioHasNoGradientInSapoAndDppo) {
  ClippedPGConfig config;
  config.ratio_mode = RatioMode::sapo;
  const RowWeights<double> row = {1.0, 1.0};
  const PolicyTerm<double> soft = token_term(config, 1e4, 0.0, 2.0, 0.8, 1.2, row, 0.0);
  EXPECT_EQ(soft.loss, -8.0);
  EXPECT_EQ(soft.grad, 0.0);
  config.ratio_mode = RatioMode::dppo_tv;
  const PolicyTerm<double> masked = token_term(config, 1e4, 0.0, 2.0, 0.8, 1.2, row, 0.0);
  EXPECT_EQ(masked.loss, 0.0);
  EXPECT_EQ(masked.grad, 0.0);
}

TEST(MismatchTerm, SeriesExpansionForSmallLogprobGapsMatchesTheExactFormulas) {
  for (const float d : {1e-6f, 1e-4f, -3e-3f, 0.02f, -0.2f, 0.37f, -0.4999f, 0.4999f}) {
    const MismatchTerm<float> near = near_mismatch_term(KlEstimator::k3, d, 0.0f);
    const MismatchTerm<double> exact = mismatch_term(KlEstimator::k3, static_cast<double>(d), 0.0);
    EXPECT_NEAR(near.importance / exact.importance, 1.0, 2e-7) << d;
    EXPECT_NEAR(near.mult_prob_error / exact.mult_prob_error, 1.0, 2e-7) << d;
    EXPECT_NEAR(near.gen_kl / exact.gen_kl, 1.0, 4e-7) << d;
    EXPECT_NEAR(near.policy_kl / exact.policy_kl, 1.0, 4e-7) << d;
    EXPECT_NEAR(near.js / exact.js, 1.0, 4e-7) << d;
    EXPECT_EQ(near_mismatch_term(KlEstimator::k1, d, 0.0f).gen_kl, -d);
    EXPECT_EQ(near_mismatch_term(KlEstimator::k2, d, 0.0f).policy_kl, d * d * 0.5f);
  }
  const MismatchTerm<float> equal = near_mismatch_term(KlEstimator::k3, -2.5f, -2.5f);
  EXPECT_EQ(equal.importance, 1.0f);
  EXPECT_EQ(equal.mult_prob_error, 1.0f);
  EXPECT_EQ(equal.gen_kl + equal.policy_kl + equal.js, 0.0f);
}

TEST(GaeScan, ParallelScanWithAnyGroupingMatchesSequentialGae) {
  std::mt19937 rng(0);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  const double gamma = 0.97, decay = gamma * 0.9, decay_value = gamma;
  for (int trial = 0; trial < 200; ++trial) {
    const int n = 1 + static_cast<int>(uniform(rng) * 40);
    std::vector<GaeRun> runs;
    std::vector<GaeState> sequential(n + 1, GaeState{0, 0, 0});
    for (int t = 0; t < n; ++t)
      runs.push_back(uniform(rng) < 0.3 ? gae_identity()
                                        : gae_token(normal(rng), normal(rng), gamma, decay, decay_value));
    for (int t = n - 1; t >= 0; --t) {
      const GaeState& s = sequential[t + 1];
      const GaeRun& r = runs[t];
      if (!r.has_value) {
        sequential[t] = s;
        continue;
      }
      const GaeCarry next =
          gae_step({s.value, s.advantage, s.value_advantage}, r.offset + r.value, r.value, gamma, decay, decay_value);
      sequential[t] = {next.next_value, next.advantage, next.value_advantage};
    }
    for (int split = 0; split <= n; ++split) {  // [0, split) after [split, n), each composed on its own
      GaeRun left = gae_identity(), right = gae_identity();
      for (int t = split - 1; t >= 0; --t) left = gae_compose(runs[t], left);
      for (int t = n - 1; t >= split; --t) right = gae_compose(runs[t], right);
      const GaeState s = gae_apply(gae_compose(left, right), {0, 0, 0}),
                     two = gae_apply(left, gae_apply(right, {0, 0, 0}));
      EXPECT_NEAR(s.advantage, sequential[0].advantage, 1e-12);
      EXPECT_NEAR(s.value_advantage, sequential[0].value_advantage, 1e-12);
      EXPECT_NEAR(two.advantage, sequential[0].advantage, 1e-12);
      EXPECT_EQ(s.value, sequential[0].value);
    }
  }
}

TEST(MeanAndVariance, MergedMomentsEqualTheMomentsOfAllValues) {
  const Moments a{2, 1.5, 0.5}, b{3, 4.0, 2.0};  // (1, 2) and (3, 4, 5)
  const Moments m = merge_moments(a, b);
  EXPECT_EQ(m.count, 5);
  EXPECT_DOUBLE_EQ(m.mean, 3.0);
  EXPECT_DOUBLE_EQ(m.m2, 10.0);
  EXPECT_EQ(merge_moments(Moments{}, b).mean, 4.0);
  EXPECT_EQ(whiten_scale<float>(WhitenRule::unbiased_added, {1, 3, 0}).degenerate, 1);
  EXPECT_EQ(whiten_scale<float>(WhitenRule::biased_clamped, {}).degenerate, 1);
}

}  // namespace
}  // namespace nemo_rl::kernels
