// AdamW (Loshchilov and Hutter, 2019) by hand and against its formula in float64; the norm; rounding to bfloat16.
#include <ATen/ATen.h>

#include <cmath>

#include "ops/adamw.h"
#include "ops/close.h"

namespace nemo_rl::ops {
namespace {

TEST(AdamW, FirstStepMovesWeightsByTheLearningRate) {
  // after one step the corrected moments are g and g², so the move is lr·g/|g|, and decay takes lr·weight_decay·w
  // before it
  const auto w = at::tensor({2.0, -1.0, 0.5}), g = at::tensor({0.3, -7.0, 1e-3}), m = at::zeros({3}, at::kDouble),
             v = at::zeros({3}, at::kDouble);
  adamw_step({w, g, m, v}, {0.1, 0.9, 0.999, 0.0, 0.5}, 1, 1.0);
  expect_close(w, at::tensor({2.0 * 0.95 - 0.1, -1.0 * 0.95 + 0.1, 0.5 * 0.95 - 0.1}), 1e-12, "weights");
}

TEST(AdamW, StepsMatchTheFormulaInFloat64) {
  for (const auto type : {at::kDouble, at::kFloat}) {
    const AdamWSettings s{1e-2, 0.8, 0.95, 1e-6, 0.1};
    const double scale = 0.25;  // gradients are multiplied first
    const std::int64_t n = 1003;
    const auto w = randn({n}, 1, type), m = at::zeros({n}, type), v = at::zeros({n}, type);
    auto ew = w.to(at::kDouble).clone(), em = at::zeros({n}, at::kDouble), ev = at::zeros({n}, at::kDouble);
    for (std::int64_t step = 1; step <= 5; ++step) {
      const auto g = randn({n}, 10 + static_cast<std::uint64_t>(step), type);
      adamw_step({w, g, m, v}, s, step, scale);
      const auto eg = g.to(at::kDouble) * scale;
      em = em * s.beta1 + eg * (1 - s.beta1);
      ev = ev * s.beta2 + eg * eg * (1 - s.beta2);
      const auto corrected = em / (1 - std::pow(s.beta1, step)), root = (ev / (1 - std::pow(s.beta2, step))).sqrt();
      ew = ew * (1 - s.lr * s.weight_decay) - s.lr * corrected / (root + s.eps);
    }
    expect_close(w, ew, 4 * bound_of(type), "weights");
    expect_close(m, em, 4 * bound_of(type), "exp_avg");
    expect_close(v, ev, 4 * bound_of(type), "exp_avg_sq");
  }
}

TEST(AdamW, Bfloat16WeightsForComputeEqualTheRoundedMasterWeights) {
  const auto w = randn({77}, 1, at::kFloat), g = randn({77}, 2, at::kFloat), m = at::zeros({77}), v = at::zeros({77}),
             compute = at::empty({77}, at::kBFloat16);
  adamw_step({w, g, m, v, compute}, {1e-3}, 1, 1.0);
  EXPECT_TRUE(at::equal(compute, w.to(at::kBFloat16)));
  const auto again = at::empty({77}, at::kBFloat16);
  round_weights(w, again);
  EXPECT_TRUE(at::equal(again, compute));
}

/// After many steps with the gradient g a moment is g and g², where rounding to nearest would stand still far below.
TEST(AdamW, Bfloat16MomentsAreUnbiased) {
  const std::int64_t n = 20000;
  const auto w = at::zeros({n}), g = at::full({n}, 0.37f), m = at::zeros({n}, at::kBFloat16),
             v = at::zeros({n}, at::kBFloat16);
  for (std::int64_t step = 1; step <= 3000; ++step) adamw_step({w, g, m, v}, {0.0, 0.9, 0.999, 1e-8, 0.0}, step, 1.0);
  EXPECT_NEAR(m.to(at::kDouble).mean().item<double>() / 0.37, 1.0, 1e-3);
  EXPECT_NEAR(v.to(at::kDouble).mean().item<double>() / (0.37 * 0.37 * (1 - std::pow(0.999, 3000))), 1.0, 2e-3);
}

TEST(AdamW, Bfloat16MomentsAreBitIdenticalForShardedAndWholeTensors) {
  const auto g = randn({50}, 2, at::kFloat);
  const auto state = [] { return std::vector{at::ones({50}), at::zeros({50}, at::kBFloat16), at::zeros({50})}; };
  const auto whole = state(), parts = state();
  for (std::int64_t step = 1; step <= 4; ++step) {
    adamw_step({whole[0], g, whole[1], whole[2]}, {1e-2}, step, 1.0);
    for (const auto& [begin, size] : {std::pair{0, 16}, {16, 34}}) {
      const auto of = [begin = begin, size = size](const at::Tensor& t) { return t.narrow(0, begin, size); };
      adamw_step({of(parts[0]), of(g), of(parts[1]), of(parts[2]), std::nullopt, begin}, {1e-2}, step, 1.0);
    }
  }
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(whole[i], parts[i])) << i;
}

TEST(AdamW, GradientNormMatchesHandComputedValues) {
  EXPECT_EQ(l2_norm(at::tensor({3.0f, 4.0f})), 5.0);
  EXPECT_EQ(l2_norm(at::zeros({0})), 0.0);
  const auto x = randn({100003}, 1, at::kFloat);
  EXPECT_NEAR(l2_norm(x) / x.to(at::kDouble).norm().item<double>(), 1.0, 1e-12);
}

}  // namespace
}  // namespace nemo_rl::ops
