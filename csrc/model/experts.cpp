#include "model/experts.h"

#include "common/check.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/swiglu.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {

namespace {

/// Of expert `e` the `count` values in a bias of all experts; undefined where that is.
at::Tensor rows_of(const at::Tensor& all, std::int64_t e, std::int64_t count) {
  return all.defined() ? all.narrow(0, e * count, count) : all;
}

}  // namespace

Experts::Experts(const ModelConfig& config) : c_(config), e_(config.experts) {
  NRL_CHECK_ARG(e_.chosen >= 1 && e_.chosen <= e_.count && e_.intermediate_size >= 1 && e_.shared_size >= 0,
                "a token goes to ", e_.chosen, " of ", e_.count, " experts of ", e_.intermediate_size, " columns");
}

std::vector<LayerTensor> Experts::tensors() const {
  using P = LayerParameters;
  const std::int64_t D = c_.hidden_size, I = e_.intermediate_size, shared = e_.shared_size;
  const bool gated = kernels::has_gate(c_.activation);
  constexpr int kWhole = ParameterSpec::kWhole;
  std::vector<LayerTensor::Part> gate_up, down, gate_up_bias, down_bias;
  const std::string block = e_.block.empty() ? "" : e_.block + ".";
  for (std::int64_t e = 0; e < e_.count; ++e) {
    const std::string expert = block + "experts." + std::to_string(e) + ".";
    if (gated) gate_up.push_back({expert + e_.gate + ".weight", I});
    gate_up.push_back({expert + e_.up + ".weight", I});
    down.push_back({expert + e_.down + ".weight", width()});
    gate_up_bias.push_back({expert + e_.gate + ".bias", I});
    gate_up_bias.push_back({expert + e_.up + ".bias", I});
    down_bias.push_back({expert + e_.down + ".bias", width()});
  }
  std::vector<LayerTensor> all;
  bool takes_adapters = false;
  const auto add = [&](at::Tensor P::* field, std::vector<LayerTensor::Part> parts, std::int64_t columns) {
    all.push_back({field, std::move(parts), columns, kWhole, takes_adapters});
  };
  const std::string module = block.empty() ? "experts" : "mlp.experts";  // PEFT's names
  const auto adapt = [&](const std::string& name) {
    all.back().takes_adapters = true, all.back().experts_module = name;
  };
  const std::string router = block + e_.router;
  add(&P::router_weight, {{router + ".weight", e_.count}}, D);
  if (e_.has_biases) add(&P::router_bias, {{router + ".bias", e_.count}}, 0);
  if (e_.sigmoid) {
    add(&P::choice_bias, {{router + ".e_score_correction_bias", e_.count}}, 0);
    all.back().is_buffer = true;
  }
  if (e_.latent_size > 0) {
    add(&P::latent_down, {{block + "fc1_latent_proj.weight", e_.latent_size}}, D);
    add(&P::latent_up, {{block + "fc2_latent_proj.weight", D}}, e_.latent_size);
  }
  add(&P::experts_gate_up, std::move(gate_up), width());
  adapt(module + ".base_layer");
  if (e_.has_biases) add(&P::experts_gate_up_bias, std::move(gate_up_bias), 0);
  add(&P::experts_down, std::move(down), I);
  adapt(module);
  if (e_.has_biases) add(&P::experts_down_bias, std::move(down_bias), 0);
  if (shared == 0) return all;
  takes_adapters = true;
  const std::string name = block + e_.shared;
  if (e_.shared_gate) add(&P::shared_gate_weight, {{name + "_gate.weight", 1}}, D);
  if (gated) add(&P::shared_gate_up, {{name + ".gate_proj.weight", shared}, {name + ".up_proj.weight", shared}}, D);
  else add(&P::shared_gate_up, {{name + ".up_proj.weight", shared}}, D);
  add(&P::shared_down, {{name + ".down_proj.weight", D}}, shared);
  return all;
}

Mlp::Kept Experts::kept() const { return {e_.chosen * up_rows(), c_.up_rows(e_.shared_size), e_.latent_size}; }

std::int64_t Experts::up_rows() const { return c_.up_rows(e_.intermediate_size); }

MatrixRows Experts::gate_up(std::int64_t e) const {
  return {&LayerParameters::experts_gate_up, e * up_rows(), up_rows()};
}

MatrixRows Experts::down(std::int64_t e) const { return {&LayerParameters::experts_down, e * width(), width()}; }

void Experts::pack(const LayerWeights& w, ops::PackedWeights& packed) const {
  w.pack(&LayerParameters::router_weight, packed);
  for (std::int64_t e = 0; e < e_.count; ++e) {
    w.pack(gate_up(e), packed, /*gated=*/true);
    w.pack(down(e), packed);
  }
  if (e_.latent_size > 0) {
    w.pack(&LayerParameters::latent_down, packed);
    w.pack(&LayerParameters::latent_up, packed);
  }
  if (e_.shared_size == 0) return;
  w.pack(&LayerParameters::shared_gate_up, packed, /*gated=*/true);
  w.pack(&LayerParameters::shared_down, packed);
}

void Experts::ask_ahead(const LayerWeights& w) const { w.ask_ahead(&LayerParameters::router_weight); }

/// The products' bits are the same with packed weights, which only a forward has.
Experts::Routes Experts::route(const LayerWeights& w, const at::Tensor& x, at::ScalarType sums,
                               Workspace& workspace) const {
  const std::int64_t T = x.size(0);
  const auto options = x.options().dtype(sums);
  Routes r{workspace.take(Slot::expert_logits, {T, e_.count}, sums),
           at::empty({T, e_.chosen}, x.options().dtype(at::kLong)),
           at::empty({T, e_.chosen}, options),
           {},
           {}};
  w.forward(&LayerParameters::router_weight, x, w.tensors().router_bias, r.logits);
  if (e_.sigmoid) ops::route_tokens_by_sigmoid(r.logits, w.tensors().choice_bias, *e_.sigmoid, r.expert, r.chosen);
  else ops::route_tokens(r.logits, e_.renormalise, r.expert, r.chosen);
  r.weight = r.chosen;
  if (const auto& scale = w.tensors().expert_scale; scale.defined())
    r.weight = r.chosen.mul(scale.index_select(0, r.expert.view(-1)).view_as(r.expert));
  r.groups = ops::group_by_expert(r.expert, e_.count);
  return r;
}

/// f(e, of), where of(rows) are those of expert `e`, for each that a token has chosen.
template <class F>
void Experts::for_each_expert(const ops::ExpertGroups& groups, const F& f) const {
  for (std::int64_t e = 0; e < e_.count; ++e) {
    const std::int64_t begin = groups.begin[static_cast<std::size_t>(e)],
                       count = groups.begin[static_cast<std::size_t>(e) + 1] - begin;
    if (count > 0) f(e, [=](const at::Tensor& rows) { return rows.narrow(0, begin, count); });
  }
}

void Experts::forward(const LayerWeights& w, const at::Tensor& x, const at::Tensor& y, bool accumulate,
                      const LayerActivations& a, Workspace& workspace) const {
  const auto routes = route(w, x, y.scalar_type(), workspace);
  if (e_.latent_size > 0) {
    const auto sum = workspace.take(Slot::latent_y, {x.size(0), e_.latent_size}, y.scalar_type());
    forward_experts(w, latent_input(w, x, workspace), routes, sum, /*accumulate=*/false, a, workspace);
    const auto latent = a.latent.defined() ? a.latent : workspace.take(Slot::latent_dy, sum.sizes(), x.scalar_type());
    latent.copy_(sum);
    w.forward(&LayerParameters::latent_up, latent, {}, y, accumulate);
  } else {
    forward_experts(w, x, routes, y, accumulate, a, workspace);
  }
  if (e_.shared_size > 0) add_shared(w, x, y, a, workspace);
}

/// [T, L] S: what latent experts read.
at::Tensor Experts::latent_input(const LayerWeights& w, const at::Tensor& x, Workspace& workspace) const {
  const auto latent = workspace.take(Slot::latent_x, {x.size(0), e_.latent_size}, x.scalar_type());
  w.forward(&LayerParameters::latent_down, x, {}, latent);
  return latent;
}

/// y (+)= the weighted sum of the chosen experts of x.
void Experts::forward_experts(const LayerWeights& w, const at::Tensor& x, const Routes& routes, const at::Tensor& y,
                              bool accumulate, const LayerActivations& a, Workspace& workspace) const {
  const std::int64_t pairs = x.size(0) * e_.chosen, D = width(), I = e_.intermediate_size, up = up_rows();
  const auto S = x.scalar_type(), A = y.scalar_type();
  const auto& groups = routes.groups;
  auto rows = workspace.take(Slot::expert_x, {pairs, D}, S);
  at::index_select_out(rows, x, 0, groups.token);
  const bool keeps = a.gate_up.defined();
  const auto gate_up = keeps ? workspace.take(Slot::expert_gate_up, {pairs, up}, S) : at::Tensor(),
             act = workspace.take(Slot::expert_act, {pairs, I}, S), out = workspace.take(Slot::expert_y, {pairs, D}, A);
  for_each_expert(groups, [&](std::int64_t e, const auto& of) {
    const auto adapters = w.adapters_of(of(groups.token));
    const auto own = w.with(adapters);
    own.gated_product(this->gate_up(e), of(rows), rows_of(w.tensors().experts_gate_up_bias, e, up),
                      keeps ? of(gate_up) : gate_up, of(act));
    own.forward(down(e), of(act), rows_of(w.tensors().experts_down_bias, e, D), of(out));
  });
  if (keeps) {
    auto by_pair = a.gate_up.view({pairs, up});
    at::index_select_out(by_pair, gate_up, 0, groups.row);
  }
  ops::add_up_experts(out, groups.row, routes.weight, e_.chosen, y, accumulate);
}

/// [T, 1] A: the sigmoid of the gate's logit; undefined if there is no gate.
at::Tensor Experts::shared_gate(const LayerWeights& w, const at::Tensor& x, const at::TensorOptions& sums) const {
  if (!e_.shared_gate) return {};
  auto gate = at::empty({x.size(0), 1}, sums);
  w.forward(&LayerParameters::shared_gate_weight, x, {}, gate);
  ops::sigmoid_gate(gate, gate);
  return gate;
}

/// y += the shared expert of x, times the sigmoid of the gate's logit if there is a gate.
void Experts::add_shared(const LayerWeights& w, const at::Tensor& x, const at::Tensor& y, const LayerActivations& a,
                         Workspace& workspace) const {
  const auto gate = shared_gate(w, x, y.options());
  const auto out = workspace.take(Slot::shared_y, y.sizes(), y.scalar_type());
  forward_shared(w, x, out, a, workspace);
  ops::add_up_experts(out, {}, gate, 1, y, /*accumulate=*/true);
}

/// y = the shared expert of x, without a gate.
void Experts::forward_shared(const LayerWeights& w, const at::Tensor& x, const at::Tensor& y, const LayerActivations& a,
                             Workspace& workspace) const {
  const auto act = workspace.take(Slot::expert_act, {x.size(0), e_.shared_size}, x.scalar_type());
  w.gated_product(&LayerParameters::shared_gate_up, x, {}, a.shared_gate_up, act);
  w.forward(&LayerParameters::shared_down, act, {}, y);
}

void Experts::backward(const LayerWeights& w, const std::function<at::Tensor()>& x_of, const at::Tensor& dy,
                       const LayerActivations& a, const at::Tensor& d_x, const LayerGradients& grads,
                       Workspace& workspace, ops::ExpertBalance* balance) const {
  const auto x = x_of();
  const auto routes = route(w, x, d_x.scalar_type(), workspace);
  if (const auto& load = w.tensors().load; load.defined())
    for (std::size_t e = 0; e + 1 < routes.groups.begin.size(); ++e)
      load.mutable_data_ptr<std::int64_t>()[e] += routes.groups.begin[e + 1] - routes.groups.begin[e];
  at::Tensor d_weight;
  if (e_.latent_size > 0) {
    if (grads.wants(&LayerParameters::latent_up)) grads.add(&LayerParameters::latent_up, dy, a.latent, workspace);
    const auto d_latent = workspace.take(Slot::latent_dy, a.latent.sizes(), dy.scalar_type()),
               d_sum = workspace.take(Slot::latent_y, a.latent.sizes(), d_x.scalar_type());
    w.backward_input(&LayerParameters::latent_up, dy, d_latent);
    d_weight = backward_experts(w, latent_input(w, x, workspace), routes, d_latent, a, d_sum, grads, workspace);
    d_latent.copy_(d_sum);
    if (grads.wants(&LayerParameters::latent_down)) grads.add(&LayerParameters::latent_down, d_latent, x, workspace);
    w.backward_input(&LayerParameters::latent_down, d_latent, d_x);
  } else {
    d_weight = backward_experts(w, x, routes, dy, a, d_x, grads, workspace);
  }
  backward_router(w, x, routes, d_weight, d_x, /*accumulate=*/true, grads, workspace, balance);
  if (e_.shared_size > 0) backward_shared(w, x, dy, a, d_x, /*accumulate=*/true, grads, workspace);
}

/// d_x = the gradient through the chosen experts of x. Returns that of their weights, [T · k] A.
/// With u = the gradient of an expert's activations before its weight w: that of w is u · act, and that of act is w ·
/// u. With a bias b of the expert's last product, that of w is u · act + dy · b, and that of b is w · dy.
at::Tensor Experts::backward_experts(const LayerWeights& w, const at::Tensor& x, const Routes& routes,
                                     const at::Tensor& dy, const LayerActivations& a, const at::Tensor& d_x,
                                     const LayerGradients& grads, Workspace& workspace) const {
  const std::int64_t pairs = dy.size(0) * e_.chosen, D = width(), I = e_.intermediate_size, up = up_rows();
  const auto S = dy.scalar_type(), A = d_x.scalar_type();
  const auto& g = grads.dense();
  const auto& groups = routes.groups;
  auto dy_rows = workspace.take(Slot::expert_dy, {pairs, D}, S),
       gate_up = workspace.take(Slot::expert_gate_up, {pairs, up}, S);
  at::index_select_out(dy_rows, dy, 0, groups.token);
  at::index_select_out(gate_up, a.gate_up.view({pairs, up}), 0, groups.pair);
  const auto act = workspace.take(Slot::expert_act, {pairs, I}, S),
             d_act = workspace.take(Slot::expert_d_act, {pairs, I}, S);
  ops::swiglu_forward(gate_up, act, c_.activation);
  for_each_expert(groups, [&](std::int64_t e, const auto& of) { w.backward_input(down(e), of(dy_rows), of(d_act)); });
  const auto d_weight = at::empty({pairs}, d_x.options()), weight = routes.weight.view(-1).index_select(0, groups.pair);
  ops::row_products(d_act, act, d_weight);
  if (e_.has_biases) backward_down_bias(w, dy_rows, weight, groups, d_weight, g.experts_down_bias, workspace);
  ops::scale_rows(d_act, weight);
  if (grads.wants(down(0))) {
    ops::scale_rows(act, weight);
    for_each_expert(groups,
                    [&](std::int64_t e, const auto& of) { grads.add(down(e), of(dy_rows), of(act), workspace); });
  }
  ops::swiglu_backward(d_act, gate_up, gate_up, c_.activation);
  if (grads.wants(this->gate_up(0))) {
    auto rows = workspace.take(Slot::expert_x, {pairs, D}, S);
    at::index_select_out(rows, x, 0, groups.token);
    for_each_expert(
        groups, [&](std::int64_t e, const auto& of) { grads.add(this->gate_up(e), of(gate_up), of(rows), workspace); });
  }
  if (g.experts_gate_up_bias.defined())
    for_each_expert(groups, [&](std::int64_t e, const auto& of) {
      ops::add_column_sums(of(gate_up), rows_of(g.experts_gate_up_bias, e, up));
    });
  const auto d_rows = workspace.take(Slot::expert_y, {pairs, D}, A);
  for_each_expert(groups,
                  [&](std::int64_t e, const auto& of) { w.backward_input(this->gate_up(e), of(gate_up), of(d_rows)); });
  ops::add_up_experts(d_rows, groups.row, {}, e_.chosen, d_x, /*accumulate=*/false);
  return d_weight.index_select(0, groups.row);
}

/// d_weight += dy · b of each pair, and d_bias += the sum of w · dy over the pairs of an expert.
void Experts::backward_down_bias(const LayerWeights& w, const at::Tensor& dy_rows, const at::Tensor& weight,
                                 const ops::ExpertGroups& groups, const at::Tensor& d_weight, const at::Tensor& d_bias,
                                 Workspace& workspace) const {
  const std::int64_t D = width();
  const auto rows = workspace.take(Slot::expert_x, dy_rows.sizes(), dy_rows.scalar_type());
  const auto products = at::empty_like(d_weight);
  for_each_expert(groups, [&](std::int64_t e, const auto& of) {
    of(rows).copy_(rows_of(w.tensors().experts_down_bias, e, D).expand_as(of(rows)));
  });
  ops::row_products(dy_rows, rows, products);
  d_weight.add_(products);
  if (!d_bias.defined()) return;
  rows.copy_(dy_rows);
  ops::scale_rows(rows, weight);
  for_each_expert(groups,
                  [&](std::int64_t e, const auto& of) { ops::add_column_sums(of(rows), rows_of(d_bias, e, D)); });
}

/// d_x (+)= the gradient through the weights of the chosen experts.
void Experts::backward_router(const LayerWeights& w, const at::Tensor& x, const Routes& routes,
                              const at::Tensor& d_weight, const at::Tensor& d_x, bool accumulate,
                              const LayerGradients& grads, Workspace& workspace, ops::ExpertBalance* balance) const {
  const auto d_logits = at::empty_like(routes.logits),
             dy = workspace.take(Slot::expert_d_logits, routes.logits.sizes(), x.scalar_type());
  auto d_chosen = d_weight;
  if (const auto& scale = w.tensors().expert_scale; scale.defined()) {
    const auto expert = routes.expert.view(-1);
    if (const auto& d_scale = grads.dense().expert_scale; d_scale.defined()) {
      const auto of_pairs = d_weight.view_as(routes.chosen).mul(routes.chosen);
      ops::add_column_sums(at::zeros_like(routes.logits).scatter(1, routes.expert, of_pairs), d_scale);
    }
    d_chosen = d_weight.mul(scale.index_select(0, expert));
  }
  if (e_.sigmoid)
    ops::route_tokens_by_sigmoid_backward(routes.logits, *e_.sigmoid, routes.expert, routes.chosen, d_chosen, d_logits);
  else ops::route_tokens_backward(routes.logits, e_.renormalise, routes.expert, routes.chosen, d_chosen, d_logits);
  if (balance != nullptr) ops::balance_experts(routes.logits, routes.expert, *balance, d_logits);
  dy.copy_(d_logits);
  if (grads.wants(&LayerParameters::router_weight)) grads.add(&LayerParameters::router_weight, dy, x, workspace);
  if (const auto& bias = grads.dense().router_bias; bias.defined()) ops::add_column_sums(dy, bias);
  w.backward_input(&LayerParameters::router_weight, dy, d_x, accumulate);
}

/// d_x (+)= the gradient through the shared expert and its gate.
void Experts::backward_shared(const LayerWeights& w, const at::Tensor& x, const at::Tensor& dy,
                              const LayerActivations& a, const at::Tensor& d_x, bool accumulate,
                              const LayerGradients& grads, Workspace& workspace) const {
  const std::int64_t T = dy.size(0), I = e_.shared_size;
  const auto S = dy.scalar_type();
  const auto gate = shared_gate(w, x, d_x.options()), d_gate = at::empty({T, 1}, d_x.options());
  const auto act = workspace.take(Slot::expert_act, {T, I}, S), d_act = workspace.take(Slot::expert_d_act, {T, I}, S);
  ops::swiglu_forward(a.shared_gate_up, act, c_.activation);
  w.backward_input(&LayerParameters::shared_down, dy, d_act);
  if (e_.shared_gate) {
    ops::row_products(d_act, act, d_gate);
    ops::scale_rows(d_act, gate);
    ops::scale_rows(act, gate);
  }
  if (grads.wants(&LayerParameters::shared_down)) grads.add(&LayerParameters::shared_down, dy, act, workspace);
  const auto d_gate_up = workspace.take(Slot::expert_gate_up, {T, c_.up_rows(I)}, S);
  ops::swiglu_backward(d_act, a.shared_gate_up, d_gate_up, c_.activation);
  if (grads.wants(&LayerParameters::shared_gate_up))
    grads.add(&LayerParameters::shared_gate_up, d_gate_up, x, workspace);
  w.backward_input(&LayerParameters::shared_gate_up, d_gate_up, d_x, accumulate);
  if (!e_.shared_gate) return;
  ops::sigmoid_gate_backward(gate, d_gate);
  const auto d_logit = at::empty({T, 1}, dy.options()).copy_(d_gate);
  if (grads.wants(&LayerParameters::shared_gate_weight))
    grads.add(&LayerParameters::shared_gate_weight, d_logit, x, workspace);
  w.backward_input(&LayerParameters::shared_gate_weight, d_logit, d_x, /*accumulate=*/true);
}

}  // namespace nemo_rl::model
