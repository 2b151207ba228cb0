// Gated activations against ATen in float64, with gradients; odd sizes, and the gradient in place.
#include <ATen/ATen.h>

#include "ops/close.h"
#include "ops/swiglu.h"

namespace nemo_rl::ops {
namespace {

using kernels::Gate;

at::Tensor reference(const at::Tensor& gate_up, Gate gate) {
  const auto halves = gate_up.chunk(2, 1);
  if (gate == Gate::clamped) {
    const auto g = halves[0].clamp_max(7);
    return g * at::sigmoid(1.702 * g) * (halves[1].clamp(-7, 7) + 1);
  }
  return (gate == Gate::silu ? at::silu(halves[0]) : at::gelu(halves[0], "tanh")) * halves[1];
}

TEST(Swiglu, MatchesHandComputedValues) {
  const auto gate_up = at::tensor({0.0, 1.0, 3.0, 2.0}).view({1, 4}), act = at::empty({1, 2}, at::kDouble);
  swiglu_forward(gate_up, act);
  EXPECT_EQ(act[0][0].item<double>(), 0.0);
  EXPECT_NEAR(act[0][1].item<double>(), 2 / (1 + std::exp(-1.0)), 1e-15);
}

TEST(Swiglu, ForwardAndBackwardMatchAtenForEveryDtypeAndActivation) {
  for (const auto type : kTypes)
    for (const auto gate : {Gate::silu, Gate::gelu_tanh, Gate::clamped})
      for (const std::int64_t I : {1, 16, 37}) {
        const auto gate_up = randn({9, 2 * I}, 1, type) * 4, d_act = randn({9, I}, 2, type),
                   act = at::empty({9, I}, type);
        swiglu_forward(gate_up, act, gate);
        const auto leaf = gate_up.to(at::kDouble).clone().set_requires_grad(true);
        const auto expected = reference(leaf, gate);
        expect_close(act, expected.detach(), bound_of(type), "act");
        expected.backward(d_act.to(at::kDouble));
        swiglu_backward(d_act, gate_up, gate_up, gate);
        expect_close(gate_up, leaf.grad(), 2 * bound_of(type), "d_gate_up");
      }
}

}  // namespace
}  // namespace nemo_rl::ops
