#include "model/adapters.h"

#include <algorithm>

#include "common/check.h"
#include "ops/linear.h"
#include "runtime/large_tensor.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

constexpr std::int64_t kMergedAtOnce = std::int64_t{1} << 18;  ///< weights: 1 MB, which the caches hold

at::ScalarType accumulation_type(const at::Tensor& weights) {
  return weights.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace

Adapters::Adapters(const ModelConfig& config, const LoraConfig& lora, const DecoderParameters& weights)
    : config_(config),
      scale_(lora.scale()),
      merges_(lora.merge),
      layout_(config, lora),
      weights_(weights),
      masters_(runtime::zeros_large({layout_.total}, weights.flat.options().dtype(accumulation_type(weights.flat)))),
      rounded_(runtime::zeros_large({layout_.total}, weights.flat.options())),
      views_(adapter_views(config, layout_, masters_)),
      factors_(adapter_views(config, layout_, rounded_)) {
  if (merges_) keep_base();
  else make_added();
  if (const auto* head = layout_.value_head(); head != nullptr)
    masters_.narrow(0, head->offset, head->numel).copy_(weights_.lm_head.view({-1}));
}

/// Copies the adapted matrices; those of all experts are one.
void Adapters::keep_base() {
  base_.resize(views_.size());
  std::int64_t total = 0, at = 0;
  const auto for_each = [&](const auto& f) {
    for (std::size_t l = 0; l < views_.size(); ++l)
      for (std::size_t m = 0; m < views_[l].all().size(); ++m) {
        const auto field = views_[l].all()[m].matrix.field;
        const bool is_first = m == 0 || views_[l].all()[m - 1].matrix.field != field;
        if (is_first) f(weights_.layers[l].*field, base_[l].*field);
      }
  };
  for_each([&](const at::Tensor& w, at::Tensor&) { total += w.numel(); });
  const auto flat = runtime::empty_large({total}, weights_.flat.options());
  for_each([&](const at::Tensor& w, at::Tensor& base) {
    base = flat.narrow(0, at, w.numel()).view(w.sizes());
    base.copy_(w);
    at += w.numel();
  });
}

/// Lays out what products add. The B of all experts of a layer are one tensor.
void Adapters::make_added() {
  added_.resize(views_.size());
  for (const auto& adapter : layout_.adapters) {
    const auto l = static_cast<std::size_t>(adapter.layer);
    const auto &masters = *views_[l].find(adapter.matrix), &factors = *factors_[l].find(adapter.matrix);
    if (adapter.first_row == 0) {
      const auto& spec = layout_.specs[adapter.b];
      const auto b = masters_.narrow(0, spec.offset, spec.numel).view({-1, adapter.dim, adapter.rows}).transpose(1, 2);
      b_.push_back({b.squeeze(0), at::zeros(b.sizes(), b.options())});
    }
    auto& added = added_[l][adapter.matrix];
    const auto i = added.parts.size();
    added.a = added.a_for_gradients = masters.a;
    added.parts.push_back({adapter.begin, b_.back().scaled[adapter.first_row / adapter.dim], factors.parts[i].b});
  }
}

GradientViews Adapters::gradient_views(const at::Tensor& flat) {
  if (!is_rounded_) round();
  return {config_, layout_, flat, factors_};
}

/// Rounds A and B to the compute type, for the matrix products of gradients.
void Adapters::round() {
  is_rounded_ = true;
  rounded_.copy_(masters_.mul(scale_));
  for (auto& layer : added_)
    for (auto& [matrix, added] : layer.all()) added.a_for_gradients = added.a.to(rounded_.scalar_type());
}

std::vector<at::Tensor> Adapters::partial(std::int64_t layer, const at::Tensor& flat) const {
  std::vector<at::Tensor> parts;
  for (const auto& adapter : layout_.adapters)
    for (const auto which : {adapter.a, adapter.b})
      if (const auto& spec = layout_.specs[which]; adapter.layer == layer && spec.split == ParameterSpec::kWhole)
        parts.push_back(flat.narrow(0, spec.offset, spec.numel));
  return parts;
}

void Adapters::masters_changed() {
  if (is_rounded_) round();
  if (merges_) {
    merge_into(weights_);
  } else {
    for (const auto& b : b_) b.scaled.view(b.masters.sizes()).copy_(b.masters).mul_(scale_);
  }
  if (const auto* head = layout_.value_head(); head != nullptr)
    weights_.lm_head.copy_(masters_.narrow(0, head->offset, head->numel).view(head->shape));
}

void Adapters::merge_into(const DecoderParameters& weights) {
  for (std::size_t l = 0; l < views_.size(); ++l)
    for (const auto& [matrix, adapters] : views_[l].all()) {
      const auto dim = adapters.a.size(0) / static_cast<std::int64_t>(adapters.parts.size());
      const auto base = matrix.of(merges_ ? base_[l] : weights_.layers[l]), merged = matrix.of(weights.layers[l]);
      for (std::size_t i = 0; i < adapters.parts.size(); ++i) {
        const auto& part = adapters.parts[i];
        const auto rows = [&](const at::Tensor& w) { return w.narrow(0, part.begin, part.b.size(1)); };
        merge(rows(base), adapters.a.narrow(0, static_cast<std::int64_t>(i) * dim, dim), part, rows(merged));
      }
    }
  merged_ = at::Tensor();
}

/// One adapter: `a` [dim, in] and part.b, of these rows of W and of the weights.
void Adapters::merge(const at::Tensor& base, const at::Tensor& a, const MatrixAdapters::Part& part,
                     const at::Tensor& weights) {
  const std::int64_t rows = base.size(0), in = base.size(1);
  if (!part.b.any().item<bool>()) {  // -0 + 0 would be 0
    weights.copy_(base);
    return;
  }
  const auto b = part.b.mul(scale_);
  const std::int64_t each = std::max<std::int64_t>(1, std::min(rows, kMergedAtOnce / in));
  if (!merged_.defined() || merged_.numel() < each * in) merged_ = at::empty({each * in}, masters_.options());
  for (std::int64_t r = 0; r < rows; r += each) {
    const std::int64_t n = std::min(each, rows - r);
    const auto sum = merged_.narrow(0, 0, n * in).view({n, in});
    sum.copy_(base.narrow(0, r, n));
    ops::linear_backward_weight(b.narrow(1, r, n), a, sum);  // += b^T · a
    weights.narrow(0, r, n).copy_(sum);
  }
}

DecoderParameters Adapters::base() const {
  auto parameters = weights_;
  if (merges_)
    for (std::size_t l = 0; l < views_.size(); ++l)
      for (const auto& of : views_[l].all()) parameters.layers[l].*of.matrix.field = base_[l].*of.matrix.field;
  return parameters;
}

}  // namespace nemo_rl::model
