#include "model/experts_beside_mlp.h"

#include <cmath>

#include "common/check.h"
#include "ops/rms_norm.h"

namespace nemo_rl::model {

std::vector<LayerTensor> ExpertsBesideMlp::tensors() const {
  using P = LayerParameters;
  const std::int64_t D = c_.hidden_size;
  auto all = Experts::tensors();
  all.insert(all.begin(), {&P::router_scale, {{"router.scale", D}}});
  all.insert(all.begin() + 2, {&P::expert_scale, {{"router.per_expert_scale", e_.count}}});
  all.push_back({&P::norm_before_experts, {{"pre_feedforward_layernorm_2.weight", D}}});
  all.push_back({&P::norm_after_experts, {{"post_feedforward_layernorm_2.weight", D}}});
  all.push_back({&P::norm_after_shared, {{"post_feedforward_layernorm_1.weight", D}}});
  return all;
}

Mlp::Kept ExpertsBesideMlp::kept() const {
  auto kept = Experts::kept();
  kept.has_branches = true;
  return kept;
}

/// [T, D] S in Slot::normed.
at::Tensor ExpertsBesideMlp::normalised(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& rstd,
                                        Workspace& workspace) const {
  const auto y = workspace.take(Slot::normed, h.sizes(), weight.scalar_type());
  ops::rms_norm_forward(h, weight, c_.rms_norm_eps, c_.norm_offset, y, if_defined(rstd));
  return y;
}

at::Tensor ExpertsBesideMlp::router_input(const LayerWeights& w, const at::Tensor& h, Workspace& workspace) const {
  return normalised(h, w.tensors().router_scale, {}, workspace).div_(std::sqrt(static_cast<double>(c_.hidden_size)));
}

void ExpertsBesideMlp::forward(const LayerWeights& w, const at::Tensor& h, const at::Tensor& y, bool accumulate,
                               const LayerActivations& a, Workspace& workspace) const {
  NRL_CHECK(!accumulate, "a norm follows an MLP with experts beside it");
  const auto& p = w.tensors();
  const auto buffer = [&](const Branch& branch, Slot slot) {
    return branch.out.defined() ? branch.out : workspace.take(slot, h.sizes(), h.scalar_type());
  };
  const auto shared = buffer(a.shared_branch, Slot::shared_y), experts = buffer(a.experts_branch, Slot::experts_out);
  forward_shared(w, normalised(h, p.norm_before_mlp, a.rstd_mid, workspace), shared, a, workspace);
  const auto routes = route(w, router_input(w, h, workspace), h.scalar_type(), workspace);
  forward_experts(w, normalised(h, p.norm_before_experts, {}, workspace), routes, experts, /*accumulate=*/false, a,
                  workspace);
  y.copy_(normalised(shared, p.norm_after_shared, a.shared_branch.rstd, workspace));
  y.add_(normalised(experts, p.norm_after_experts, a.experts_branch.rstd, workspace));
}

void ExpertsBesideMlp::backward(const LayerWeights& w, const std::function<at::Tensor()>& h_of, const at::Tensor& dy,
                                const LayerActivations& a, const at::Tensor& d_h, const LayerGradients& grads,
                                Workspace& workspace, ops::ExpertBalance* balance) const {
  const auto &p = w.tensors(), &g = grads.dense();
  const auto h = h_of(), dy_sums = dy.to(d_h.scalar_type());
  const auto d_inner = workspace.take(Slot::d_inner, h.sizes(), d_h.scalar_type()),
             dy_inner = workspace.take(Slot::dy_inner, h.sizes(), dy.scalar_type());
  const auto out_of = [&](const Branch& branch, const at::Tensor& norm, const at::Tensor& d_norm) {
    ops::rms_norm_backward(dy_sums, branch.out, norm, c_.norm_offset, branch.rstd, d_inner, /*accumulate=*/false,
                           d_norm);
    dy_inner.copy_(d_inner);
  };
  const auto into = [&](const at::Tensor& norm, const at::Tensor& d_norm, bool accumulate) {
    ops::rms_norm_backward(d_inner, h, norm, c_.norm_offset, a.rstd_mid, d_h, accumulate, d_norm);
  };
  out_of(a.shared_branch, p.norm_after_shared, g.norm_after_shared);
  backward_shared(w, normalised(h, p.norm_before_mlp, {}, workspace), dy_inner, a, d_inner, /*accumulate=*/false, grads,
                  workspace);
  into(p.norm_before_mlp, g.norm_before_mlp, /*accumulate=*/false);

  out_of(a.experts_branch, p.norm_after_experts, g.norm_after_experts);
  const auto routes = route(w, router_input(w, h, workspace), h.scalar_type(), workspace);
  const auto d_weight = backward_experts(w, normalised(h, p.norm_before_experts, {}, workspace), routes, dy_inner, a,
                                         d_inner, grads, workspace);
  into(p.norm_before_experts, g.norm_before_experts, /*accumulate=*/true);

  backward_router(w, router_input(w, h, workspace), routes, d_weight, d_inner, /*accumulate=*/false, grads, workspace,
                  balance);
  d_inner.div_(std::sqrt(static_cast<double>(c_.hidden_size)));
  into(p.router_scale, g.router_scale, /*accumulate=*/true);
}

}  // namespace nemo_rl::model
