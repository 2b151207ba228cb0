// RMS norm against its formula and autograd in float64: one row a token, heads side by side, strided rows, added
// gradients.
#include <ATen/ATen.h>

#include "ops/close.h"
#include "ops/rms_norm.h"

namespace nemo_rl::ops {
namespace {

constexpr double kEps = 1e-5;

/// y and rstd of x [T, inner, D] by the formula.
std::pair<at::Tensor, at::Tensor> reference(const at::Tensor& x, const at::Tensor& w) {
  const auto rstd = (x.pow(2).mean(-1) + kEps).rsqrt();
  return {x * rstd.unsqueeze(-1) * w, rstd};
}

TEST(RmsNorm, MatchesHandComputedValues) {
  // mean of squares (9 + 16) / 2 = 12.5
  const auto x = at::tensor({3.0, 4.0}).view({1, 2}), y = at::empty_like(x), rstd = at::empty({1, 1}, at::kDouble);
  rms_norm_forward(x, at::tensor({1.0, 10.0}), 0.0, 0.0, y, rstd);
  EXPECT_NEAR(rstd.item<double>(), 1 / std::sqrt(12.5), 1e-15);
  EXPECT_NEAR(y[0][0].item<double>(), 3 / std::sqrt(12.5), 1e-15);
  EXPECT_NEAR(y[0][1].item<double>(), 40 / std::sqrt(12.5), 1e-15);
}

TEST(RmsNorm, ForwardMatchesTheFormulaForEveryTypeAndShape) {
  for (const auto type : kTypes)
    for (const std::int64_t inner : {1, 3})
      for (const std::int64_t D : {8, 37, 576}) {
        const auto wide = randn({5, inner * D + 8}, 1, type), w = randn({D}, 2, type);
        const auto x = wide.narrow(1, 0, inner * D), y = at::empty({5, inner * D}, type),
                   rstd = at::empty({5, inner}, sums_of(type));
        rms_norm_forward(x, w, kEps, /*offset=*/1, y, rstd);
        const auto [expected, expected_rstd] =
            reference(x.to(at::kDouble).reshape({5, inner, D}), w.to(at::kDouble) + 1);
        expect_close(y, expected.reshape({5, inner * D}), bound_of(type), "y");
        expect_close(rstd, expected_rstd, bound_of(sums_of(type)), "rstd");
      }
}

TEST(RmsNorm, BackwardMatchesAutogradWithAndWithoutAccumulation) {
  for (const auto type : kTypes) {
    const std::int64_t T = 70, D = 24;  // more than one block of rows
    const auto A = sums_of(type);
    const auto x = randn({T, D}, 1, A), w = randn({D}, 2, type), dy = randn({T, D}, 3, A);
    const auto y = at::empty({T, D}, type), rstd = at::empty({T, 1}, A);
    rms_norm_forward(x, w, kEps, /*offset=*/1, y, rstd);
    const auto leaf = x.to(at::kDouble).clone().set_requires_grad(true),
               weight = w.to(at::kDouble).clone().set_requires_grad(true);
    reference(leaf.unsqueeze(1), weight + 1).first.squeeze(1).backward(dy.to(at::kDouble));
    for (const bool accumulate : {false, true}) {
      const auto before = randn({T, D}, 4, A), dx = before.clone(), dw = at::ones({D}, A);
      rms_norm_backward(dy, x, w, /*offset=*/1, rstd, dx, accumulate, dw);
      expect_close(dx, leaf.grad() + (accumulate ? before.to(at::kDouble) : at::zeros({T, D}, at::kDouble)),
                   4 * bound_of(A), "dx");
      expect_close(dw, weight.grad() + 1, 4 * bound_of(A), "dw");
    }
  }
}

}  // namespace
}  // namespace nemo_rl::ops
