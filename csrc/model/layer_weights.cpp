#include "model/layer_weights.h"

#include <algorithm>

#include "ops/linear.h"
#include "ops/swiglu.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

constexpr std::int64_t kAtOnce = std::int64_t{1} << 24;  ///< inputs or sums in the accumulation type: 64 MB

const AddedToMatrix* added_to(const AddedAdapters* adapters, std::int64_t layer, const MatrixRows& m) {
  return adapters == nullptr ? nullptr : (*adapters)[static_cast<std::size_t>(layer)].find(m);
}

at::ScalarType sums_of(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace

std::vector<AdapterRows> LayerWeights::adapters_of(const at::Tensor& token) const {
  std::vector<AdapterRows> of;
  if (context_.rows.empty()) return of;
  const auto on_host = token.cpu();
  const auto* const rows = on_host.const_data_ptr<std::int64_t>();
  for (std::int64_t r = 0; r < on_host.numel(); ++r) {
    auto in_batch = context_.rows.begin();
    for (auto before = rows[r]; before >= in_batch->count; ++in_batch) before -= in_batch->count;
    if (of.empty() || of.back().adapters != in_batch->adapters) of.push_back({0, in_batch->adapters});
    ++of.back().count;
  }
  return of;
}

/// The rows of W that follow dense(m), if W is quantised and they have more bits; otherwise undefined.
at::Tensor LayerWeights::rest(const MatrixRows& m) const {
  return m.field == &LayerParameters::qkv_weight ? tensors_.qkv_rest : at::Tensor();
}

/// Whether any row has adapters of this matrix.
bool LayerWeights::is_adapted(const MatrixRows& m) const {
  if (context_.rows.empty()) return added_to(added_, layer_, m) != nullptr;
  return std::ranges::any_of(context_.rows,
                             [&](const auto& rows) { return added_to(rows.adapters, layer_, m) != nullptr; });
}

/// y (+)= x · Wᵀ + bias, without adapters.
void LayerWeights::product(const MatrixRows& m, const at::Tensor& x, const at::Tensor& bias, const at::Tensor& y,
                           bool accumulate) const {
  const auto w = dense(m), after = rest(m);
  if (!after.defined()) return ops::linear_forward(x, w, if_defined(bias), y, accumulate, context_.packed);
  const auto part = [&](const at::Tensor& rows, std::int64_t begin) {
    const auto own = bias.defined() ? bias.narrow(0, begin, rows.size(0)) : bias;
    ops::linear_forward(x, rows, if_defined(own), y.narrow(1, begin, rows.size(0)), accumulate);
  };
  part(w, 0);
  part(after, w.size(0));
}

void LayerWeights::forward(MatrixRows m, const at::Tensor& x, const at::Tensor& bias, const at::Tensor& y,
                           bool accumulate) const {
  if (!is_adapted(m)) return product(m, x, bias, y, accumulate);
  const auto A = sums_of(x);
  const bool keeps_sums = y.scalar_type() == A;
  if (keeps_sums) product(m, x, bias, y, accumulate);
  const std::int64_t T = x.size(0), out = y.size(1),
                     at_once = std::max<std::int64_t>(1, kAtOnce / std::max(x.size(1), out));
  for (std::int64_t t = 0; t < T; t += at_once) {
    const std::int64_t n = std::min(at_once, T - t);
    const auto rows = x.narrow(0, t, n), to = y.narrow(0, t, n);
    const auto sums = keeps_sums ? to : context_.workspace.take(Slot::adapted, {n, out}, A);
    if (!keeps_sums) {
      if (accumulate) sums.copy_(to);
      product(m, rows, bias, sums, accumulate);
    }
    add_adapters(m, rows, t, sums);
    if (!keeps_sums) to.copy_(sums);
  }
}

/// y [n, out] A += what the adapters of these rows give; x [n, in] are rows [first, first + n) of the batch.
void LayerWeights::add_adapters(const MatrixRows& m, const at::Tensor& x, std::int64_t first,
                                const at::Tensor& y) const {
  if (context_.rows.empty()) return add(*added_to(added_, layer_, m), x, y);
  const std::int64_t last = first + x.size(0);
  std::int64_t begin = 0;
  for (const auto& rows : context_.rows) {
    const std::int64_t from = std::max(begin, first), to = std::min(begin + rows.count, last);
    begin += rows.count;
    const auto* const added = added_to(rows.adapters, layer_, m);
    if (added != nullptr && from < to)
      add(*added, x.narrow(0, from - first, to - from), y.narrow(0, from - first, to - from));
  }
}

void LayerWeights::add(const AddedToMatrix& added, const at::Tensor& x, const at::Tensor& y) const {
  const std::int64_t n = x.size(0), dim = added.dim();
  const auto A = y.scalar_type();
  auto input = x;
  if (x.scalar_type() != A) input = context_.workspace.take(Slot::adapter_input, x.sizes(), A).copy_(x);
  const auto inner = context_.workspace.take(Slot::adapter_inner, {n, added.a.size(0)}, A);
  ops::linear_forward(input, added.a, std::nullopt, inner);
  for (std::size_t i = 0; i < added.parts.size(); ++i) {
    const auto& part = added.parts[i];
    ops::linear_forward(inner.narrow(1, static_cast<std::int64_t>(i) * dim, dim), part.b, std::nullopt,
                        y.narrow(1, part.begin, part.b.size(0)),
                        /*accumulate=*/true);
  }
}

void LayerWeights::gated_product(MatrixRows m, const at::Tensor& x, const at::Tensor& bias, const at::Tensor& gate_up,
                                 const at::Tensor& act) const {
  if (config_.has_gated_product() && !is_adapted(m))
    return ops::linear_swiglu(x, dense(m), if_defined(bias), gate_up, act, config_.activation, context_.packed);
  auto both = gate_up;
  if (!both.defined())
    both = context_.workspace.take(Slot::gate_up, {x.size(0), config_.up_rows(act.size(1))}, x.scalar_type());
  forward(m, x, bias, both);
  ops::swiglu_forward(both, act, config_.activation);
}

void LayerWeights::backward_input(MatrixRows m, const at::Tensor& dy, const at::Tensor& dx, bool accumulate) const {
  const auto w = dense(m), after = rest(m);
  if (after.defined()) {
    ops::linear_backward_input(dy.narrow(1, 0, w.size(0)), w, dx, accumulate);
    ops::linear_backward_input(dy.narrow(1, w.size(0), after.size(0)), after, dx, /*accumulate=*/true);
  } else {
    ops::linear_backward_input(dy, w, dx, accumulate);
  }
  const auto* const added = added_to(added_, layer_, m);
  if (added == nullptr) return;
  const std::int64_t dim = added->dim();
  const auto inner = context_.workspace.take(Slot::adapter_y, {dy.size(0), added->a.size(0)}, dy.scalar_type());
  for (std::size_t i = 0; i < added->parts.size(); ++i) {
    const auto& part = added->parts[i];
    ops::linear_forward(dy.narrow(1, part.begin, part.b.size(0)), part.b_for_gradients, std::nullopt,
                        inner.narrow(1, static_cast<std::int64_t>(i) * dim, dim));
  }
  ops::linear_backward_input(inner, added->a_for_gradients, dx,
                             /*accumulate=*/true);
}

void LayerWeights::ask_ahead(MatrixRows m, bool gated) const {
  ops::linear_ask_ahead(dense(m), gated && config_.has_gated_product() && !is_adapted(m), context_.packed);
}

void LayerWeights::pack(MatrixRows m, ops::PackedWeights& packed, bool gated) const {
  packed.pack(dense(m), gated && config_.has_gated_product() && !is_adapted(m));
}

}  // namespace nemo_rl::model
