#include "model/gradient_views.h"

#include "common/check.h"
#include "ops/linear.h"

namespace nemo_rl::model {

std::vector<LayerAdapters> adapter_views(const ModelConfig& config, const ParameterLayout& layout,
                                         const at::Tensor& flat) {
  NRL_CHECK(flat.dim() == 1 && flat.numel() == layout.total && flat.is_contiguous(), "adapters of ", layout.total,
            " elements were expected, got ", flat.sizes());
  std::vector<LayerAdapters> layers(static_cast<std::size_t>(config.num_layers()));
  for (const auto& adapter : layout.adapters) {
    const auto &a = layout.specs[adapter.a], &b = layout.specs[adapter.b];
    auto& of = layers[static_cast<std::size_t>(adapter.layer)][adapter.matrix];
    of.parts.push_back(
        {adapter.begin, flat.narrow(0, b.offset + adapter.first_row * adapter.rows, adapter.dim * adapter.rows)
                            .view({adapter.dim, adapter.rows})});
    const auto rows = static_cast<std::int64_t>(of.parts.size()) * adapter.dim;  // the A before this one and itself
    const auto end = a.offset + (adapter.first_row + adapter.dim) * adapter.columns;
    of.a = flat.narrow(0, end - rows * adapter.columns, rows * adapter.columns).view({rows, adapter.columns});
  }
  return layers;
}

bool LayerGradients::wants(const MatrixRows& matrix) const {
  return (dense_.*matrix.field).defined() || (adapters_ != nullptr && adapters_->find(matrix) != nullptr);
}

void LayerGradients::add(const MatrixRows& matrix, const at::Tensor& dy, const at::Tensor& x,
                         Workspace& workspace) const {
  if (const auto dense = matrix.of(dense_); dense.defined()) return ops::linear_backward_weight(dy, x, dense);
  const auto *gradients = adapters_->find(matrix), *factors = factors_->find(matrix);
  const std::int64_t T = x.size(0), all = gradients->a.size(0),
                     dim = all / static_cast<std::int64_t>(gradients->parts.size());
  const auto xa = workspace.take(Slot::adapter_x, {T, all}, x.scalar_type()),
             yb = workspace.take(Slot::adapter_y, {T, all}, x.scalar_type());
  ops::linear_forward(x, factors->a, std::nullopt, xa);
  for (std::size_t i = 0; i < gradients->parts.size(); ++i) {
    const auto& to = gradients->parts[i];
    const std::int64_t first = static_cast<std::int64_t>(i) * dim;
    const auto dy_part = dy.narrow(1, to.begin, to.b.size(1));
    ops::linear_backward_weight(xa.narrow(1, first, dim), dy_part, to.b);
    ops::linear_forward(dy_part, factors->parts[i].b, std::nullopt, yb.narrow(1, first, dim));
  }
  ops::linear_backward_weight(yb, x, gradients->a);
}

GradientViews::GradientViews(const ModelConfig& config, const ParameterLayout& layout, at::Tensor flat,
                             bool without_routers)
    : dense_(config, layout, std::move(flat)) {
  if (without_routers)
    for (auto& layer : dense_.layers) layer.router_scale = layer.router_weight = layer.expert_scale = at::Tensor();
}

GradientViews::GradientViews(const ModelConfig& config, const ParameterLayout& layout, const at::Tensor& flat,
                             const std::vector<LayerAdapters>& factors)
    : adapters_(adapter_views(config, layout, flat)), factors_(&factors) {
  dense_.layers.resize(adapters_.size());
  if (const auto* head = layout.value_head(); head != nullptr)
    dense_.lm_head = flat.narrow(0, head->offset, head->numel).view(head->shape);
  while (adapters_[static_cast<std::size_t>(first_layer_)].all().empty()) ++first_layer_;
}

LayerGradients GradientViews::layer(std::int64_t l) const {
  const auto at = static_cast<std::size_t>(l);
  return {dense_.layers[at], factors_ ? &adapters_[at] : nullptr, factors_ ? &(*factors_)[at] : nullptr};
}

}  // namespace nemo_rl::model
