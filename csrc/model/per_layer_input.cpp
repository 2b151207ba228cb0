#include "model/per_layer_input.h"

#include <cmath>

#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"
#include "ops/swiglu.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

/// f(first, n) for T rows in groups, because a row in the accumulation type is many times as long as the stream.
template <class F>
void for_rows(std::int64_t T, const F& f) {
  constexpr std::int64_t kRows = 512;
  for (std::int64_t t = 0; t < T; t += kRows) f(t, std::min(kRows, T - t));
}

double root(std::int64_t n) { return std::sqrt(static_cast<double>(n)); }

}  // namespace

std::vector<LayerTensor> PerLayerInput::tensors(const ModelConfig& c) {
  using P = LayerParameters;
  return {{&P::per_layer_gate, {{"per_layer_input_gate.weight", c.per_layer_input}}, c.hidden_size},
          {&P::per_layer_projection, {{"per_layer_projection.weight", c.hidden_size}}, c.per_layer_input}};
}

/// projection · x / sqrt(D), [n, L·P] A, for x [n, D] S.
at::Tensor PerLayerInput::projected(const DecoderParameters& p, const at::Tensor& x, at::ScalarType sums) const {
  const auto y = at::empty({x.size(0), columns()}, x.options().dtype(sums));
  ops::linear_forward(x, p.per_layer_projection, std::nullopt, y);
  return y.mul_(1 / root(c_.hidden_size));
}

at::Tensor PerLayerInput::inputs(const DecoderParameters& p, const at::Tensor& token_ids, const at::Tensor& e,
                                 Workspace& workspace) const {
  const auto S = p.flat.scalar_type();
  const auto all = workspace.take(Slot::per_layer, {e.size(0), columns()}, S);
  for_rows(e.size(0), [&](std::int64_t t, std::int64_t n) {
    const auto result = all.narrow(0, t, n), y = projected(p, e.narrow(0, t, n).to(S), e.scalar_type());
    ops::rms_norm_forward(y, p.per_layer_norm, c_.rms_norm_eps, c_.norm_offset, result, std::nullopt);
    const auto sum = at::empty_like(y);
    ops::embedding_forward(p.per_layer_embedding, token_ids.narrow(0, t, n), sum, S);
    result.copy_(sum.mul_(root(c_.per_layer_input)).add_(result).mul_(std::sqrt(0.5)));
  });
  return all;
}

void PerLayerInput::inputs_backward(const DecoderParameters& p, const at::Tensor& token_ids, const at::Tensor& e,
                                    const at::Tensor& d_inputs, const DecoderParameters& grads,
                                    const at::Tensor& d_e) const {
  const auto S = p.flat.scalar_type(), A = e.scalar_type();
  for_rows(e.size(0), [&](std::int64_t t, std::int64_t n) {
    const auto x = e.narrow(0, t, n).to(S), y = projected(p, x, A);
    const auto rstd = at::empty({n, c_.num_layers()}, y.options());
    ops::rms_norm_forward(y, p.per_layer_norm, c_.rms_norm_eps, c_.norm_offset, at::empty(y.sizes(), x.options()),
                          rstd);
    const auto d = d_inputs.narrow(0, t, n).to(A, /*non_blocking=*/false, /*copy=*/true).mul_(std::sqrt(0.5));
    ops::embedding_backward(d.mul(root(c_.per_layer_input)), token_ids.narrow(0, t, n), grads.per_layer_embedding);
    ops::rms_norm_backward(d, y, p.per_layer_norm, c_.norm_offset, rstd, d, /*accumulate=*/false, grads.per_layer_norm);
    const auto dy = d.mul_(1 / root(c_.hidden_size)).to(S);
    ops::linear_backward_weight(dy, x, grads.per_layer_projection);
    ops::linear_backward_input(dy, p.per_layer_projection, d_e.narrow(0, t, n), /*accumulate=*/true);
  });
}

void PerLayerInput::forward(const LayerWeights& w, std::int64_t l, const at::Tensor& x, const at::Tensor& inputs,
                            const at::Tensor& kept, const at::Tensor& y, bool accumulate, Workspace& workspace) const {
  const std::int64_t T = x.size(0), P = c_.per_layer_input;
  const auto both = kept.defined() ? kept : workspace.take(Slot::gate_up, {T, 2 * P}, x.scalar_type()),
             act = workspace.take(Slot::act, {T, P}, x.scalar_type());
  w.forward(&LayerParameters::per_layer_gate, x, {}, both.narrow(1, 0, P));
  both.narrow(1, P, P).copy_(inputs.narrow(1, l * P, P));
  ops::swiglu_forward(both, act, c_.activation);
  w.forward(&LayerParameters::per_layer_projection, act, {}, y, accumulate);
}

void PerLayerInput::backward(const LayerWeights& w, std::int64_t l, const at::Tensor& x, const at::Tensor& dy,
                             const at::Tensor& kept, const at::Tensor& d_x, const at::Tensor& d_inputs,
                             const LayerGradients& grads, Workspace& workspace) const {
  const std::int64_t T = x.size(0), P = c_.per_layer_input;
  const auto S = x.scalar_type();
  if (grads.wants(&LayerParameters::per_layer_projection)) {
    const auto act = workspace.take(Slot::act, {T, P}, S);
    ops::swiglu_forward(kept, act, c_.activation);
    grads.add(&LayerParameters::per_layer_projection, dy, act, workspace);
  }
  const auto d_act = workspace.take(Slot::d_act, {T, P}, S), d_both = workspace.take(Slot::d_gate_up, {T, 2 * P}, S);
  w.backward_input(&LayerParameters::per_layer_projection, dy, d_act);
  ops::swiglu_backward(d_act, kept, d_both, c_.activation);
  if (d_inputs.defined()) d_inputs.narrow(1, l * P, P).copy_(d_both.narrow(1, P, P));
  const auto d_gate = d_both.narrow(1, 0, P);
  if (grads.wants(&LayerParameters::per_layer_gate)) grads.add(&LayerParameters::per_layer_gate, d_gate, x, workspace);
  w.backward_input(&LayerParameters::per_layer_gate, d_gate, d_x);
}

}  // namespace nemo_rl::model
