// Rotary embedding by hand: a quarter turn, whole rows against complex numbers, and back again.
#include <ATen/ATen.h>

#include "ops/close.h"
#include "ops/rope.h"

namespace nemo_rl::ops {
namespace {

TEST(Rope, RotationByAQuarterTurnMatchesHandComputedValues) {
  // one head of size 2 at position 1, whose angle is a quarter turn: (a, b) -> (-b, a)
  const auto x = at::tensor({3.0f, 5.0f}).view({1, 2});
  const auto cos = at::tensor({1.0f, 0.0f}).view({2, 1}), sin = at::tensor({0.0f, 1.0f}).view({2, 1});
  rope(x, 1, 2, at::tensor({1L}), cos, sin);
  EXPECT_EQ(x[0][0].item<float>(), -5.0f);
  EXPECT_EQ(x[0][1].item<float>(), 3.0f);
}

TEST(Rope, QueryAndKeyHeadsAreRotatedByPositionAndTheInverseRestoresThem) {
  for (const auto type : kTypes) {
    const std::int64_t T = 6, heads = 3, H = 16, half = H / 2;
    const auto angles = randn({10, half}, 1, at::kFloat), cos = angles.cos(), sin = angles.sin();
    const auto positions = at::tensor({0L, 9L, 4L, 4L, 1L, 7L});
    const auto before = randn({T, heads * H + 5}, 2, type), x = before.clone();
    rope(x, heads, H, positions, cos, sin);
    const auto turn =
        at::complex(cos.index_select(0, positions).to(at::kDouble), sin.index_select(0, positions).to(at::kDouble))
            .unsqueeze(1);
    const auto parts = before.narrow(1, 0, heads * H).to(at::kDouble).reshape({T, heads, 2, half});
    const auto turned = at::complex(parts.select(2, 0).contiguous(), parts.select(2, 1).contiguous()) * turn;
    const auto expected = at::stack({at::real(turned), at::imag(turned)}, 2).reshape({T, heads * H});
    expect_close(x.narrow(1, 0, heads * H), expected, type == at::kDouble ? 1e-7 : bound_of(type),
                 "rotated");  // the table is float32
    EXPECT_TRUE(at::equal(x.narrow(1, heads * H, 5), before.narrow(1, heads * H, 5)));
    rope(x, heads, H, positions, cos, sin, /*inverse=*/true);
    expect_close(x, before, type == at::kDouble ? 1e-6 : 2 * bound_of(type), "rotated back");
  }
}

TEST(Rope, PartialRopeRotatesInterleavedPairsInTheLastDimensionsOfEachHead) {
  for (const auto type : kTypes) {
    const std::int64_t T = 5, heads = 3, H = 24, R = 8, before_it = H - R;
    const auto angles = randn({7, R / 2}, 1, at::kFloat), cos = angles.cos(), sin = angles.sin();
    const auto positions = at::tensor({6L, 0L, 3L, 3L, 1L});
    const auto before = randn({T, heads * H}, 2, type), x = before.clone();
    const auto part = x.narrow(1, before_it, (heads - 1) * H + R);
    rope(part, heads, H, positions, cos, sin, /*inverse=*/false, /*interleaved=*/true);
    const auto turn =
        at::complex(cos.index_select(0, positions).to(at::kDouble), sin.index_select(0, positions).to(at::kDouble))
            .unsqueeze(1);
    auto expected = before.to(at::kDouble).view({T, heads, H}).clone();
    const auto pairs = expected.narrow(2, before_it, R).contiguous().view({T, heads, R / 2, 2});
    expected.narrow(2, before_it, R).copy_(at::view_as_real(at::view_as_complex(pairs) * turn).view({T, heads, R}));
    expect_close(x, expected.view({T, heads * H}), type == at::kDouble ? 1e-7 : bound_of(type), "rotated");
    rope(part, heads, H, positions, cos, sin, /*inverse=*/true, /*interleaved=*/true);
    expect_close(x, before, type == at::kDouble ? 1e-6 : 2 * bound_of(type), "rotated back");
  }
}

}  // namespace
}  // namespace nemo_rl::ops
