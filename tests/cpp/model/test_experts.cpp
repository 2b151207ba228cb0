// Experts without gates and with a sigmoid router (Nemotron 3), and latent ones: results and gradients against ATen's,
// and rows that do not depend on one another.
#include <ATen/ATen.h>

#include "model/experts.h"
#include "ops/close.h"

namespace nemo_rl::model {
namespace {

using ops::expect_close;
using ops::randn;

ModelConfig config_without_gates(std::int64_t latent_size) {
  ModelConfig c;
  c.hidden_size = 32, c.activation = kernels::Gate::relu_squared, c.layers.resize(1);
  c.layers[0].has_experts = true;
  c.experts.count = 5, c.experts.chosen = 2, c.experts.intermediate_size = 24;
  c.experts.latent_size = latent_size, c.experts.shared_size = 40, c.experts.shared_gate = false;
  c.experts.sigmoid = ops::SigmoidRouter{1, 1, true, 2.5};
  return c;
}

/// The tensors of the experts, with random values or zeros.
LayerParameters tensors_of(const ModelConfig& c, at::ScalarType type, bool zeros = false) {
  LayerParameters p;
  std::uint64_t seed = 1;
  for (const auto& tensor : Experts(c).tensors()) {
    std::int64_t rows = 0;
    for (const auto& part : tensor.parts) rows += part.rows;
    const auto values = randn(tensor.columns > 0 ? std::vector{rows, tensor.columns} : std::vector{rows}, seed++) * 0.3;
    p.*tensor.field = values.to(tensor.is_buffer ? ops::sums_of(type) : type);
    if (zeros) (p.*tensor.field).zero_();
  }
  return p;
}

struct Result {
  at::Tensor y;
  LayerActivations kept;
};

Result forward(const ModelConfig& c, const LayerParameters& p, const at::Tensor& x) {
  const Experts experts(c);
  Workspace workspace;
  Result r{at::empty({x.size(0), c.hidden_size}, x.options().dtype(ops::sums_of(x.scalar_type()))), {}};
  r.kept.gate_up = at::empty({x.size(0), experts.kept().gate_up}, x.options());
  r.kept.latent = at::empty({x.size(0), experts.kept().latent}, x.options());
  r.kept.shared_gate_up = at::empty({x.size(0), experts.kept().shared_gate_up}, x.options());
  experts.forward({c, 0, p, nullptr, {workspace}}, x, r.y, /*accumulate=*/false, r.kept, workspace);
  return r;
}

at::Tensor relu_squared_mlp(const at::Tensor& x, const at::Tensor& up, const at::Tensor& down) {
  return at::relu(x.matmul(up.t())).square().matmul(down.t());
}

/// The same with a loop over all experts, whose weight is 0 for a token that has not chosen them.
at::Tensor expected(const ModelConfig& c, const LayerParameters& p, const at::Tensor& x) {
  const auto& e = c.experts;
  const auto scores = at::sigmoid(x.matmul(p.router_weight.t()));
  const auto expert = std::get<1>((scores + p.choice_bias).topk(e.chosen));
  const auto chosen = scores.gather(1, expert);
  const auto weight = e.sigmoid->scale * chosen / chosen.sum(1, /*keepdim=*/true);
  const auto weights = at::zeros_like(scores).scatter(1, expert, weight);
  const auto input = e.latent_size > 0 ? x.matmul(p.latent_down.t()) : x;
  auto sum = at::zeros_like(input);
  const auto ups = p.experts_gate_up.chunk(e.count), downs = p.experts_down.chunk(e.count);
  for (std::size_t i = 0; i < ups.size(); ++i)
    sum = sum + weights.narrow(1, static_cast<std::int64_t>(i), 1) * relu_squared_mlp(input, ups[i], downs[i]);
  if (e.latent_size > 0) sum = sum.matmul(p.latent_up.t());
  return sum + relu_squared_mlp(x, p.shared_gate_up, p.shared_down);
}

class ExpertsWithoutGates : public testing::TestWithParam<std::int64_t> {};

TEST_P(ExpertsWithoutGates, ResultsAndGradientsMatchAten) {
  const auto c = config_without_gates(GetParam());
  const auto tensors = Experts(c).tensors();
  auto p = tensors_of(c, at::kDouble);
  const auto x = randn({21, c.hidden_size}, 50).set_requires_grad(true), dy = randn({21, c.hidden_size}, 51);
  const auto r = forward(c, p, x.detach());
  const auto grads = tensors_of(c, at::kDouble, /*zeros=*/true);
  const auto d_x = at::empty_like(x.detach());
  Workspace workspace;
  Experts(c).backward(
      {c, 0, p, nullptr, {workspace}}, [&] { return x.detach(); }, dy, r.kept, d_x, {grads, nullptr, nullptr},
      workspace, nullptr);
  for (const auto& tensor : tensors)
    if (!tensor.is_buffer) (p.*tensor.field).set_requires_grad(true);
  const auto y = expected(c, p, x);
  expect_close(r.y, y.detach(), 1e-12);
  y.backward(dy);
  expect_close(d_x, x.grad(), 1e-11, "x");
  for (const auto& tensor : tensors)
    if (!tensor.is_buffer)
      expect_close(grads.*tensor.field, (p.*tensor.field).grad(), 1e-11, tensor.parts[0].name.c_str());
}

TEST_P(ExpertsWithoutGates, OutputOfATokenDoesNotDependOnOtherTokens) {
  const auto c = config_without_gates(GetParam());
  for (const auto type : {at::kFloat, at::kBFloat16}) {
    const auto p = tensors_of(c, type);
    const auto x = randn({40, c.hidden_size}, 60, type);
    const auto all = forward(c, p, x).y;
    for (const std::int64_t t : {0, 17, 39}) EXPECT_TRUE(at::equal(forward(c, p, x.narrow(0, t, 1)).y[0], all[t]));
    EXPECT_TRUE(at::equal(forward(c, p, x.narrow(0, 5, 9)).y, all.narrow(0, 5, 9)));
  }
}

INSTANTIATE_TEST_SUITE_P(LatentSizes, ExpertsWithoutGates, testing::Values(0, 16));

}  // namespace
}  // namespace nemo_rl::model
