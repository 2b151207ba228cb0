#include "model/layer_weights.h"

#include "ops/linear.h"
#include "ops/swiglu.h"

namespace nemo_rl::model {

at::Tensor LayerWeights::dense(const MatrixRows& m) const {
  const auto& all = tensors_.*m.field;
  return m.count == MatrixRows::kAll ? all : all.narrow(0, m.begin, m.count);
}

void LayerWeights::forward(MatrixRows m, const at::Tensor& x, const at::Tensor& bias, const at::Tensor& y,
                           bool accumulate) const {
  ops::linear_forward(x, dense(m), if_defined(bias), y, accumulate, packed_);
}

void LayerWeights::gated_product(MatrixRows m, const at::Tensor& x, const at::Tensor& bias, const at::Tensor& gate_up,
                                 const at::Tensor& act) const {
  if (config_.has_gated_product()) return ops::linear_swiglu(x, dense(m), if_defined(bias), gate_up, act, packed_);
  const auto both =
      gate_up.defined() ? gate_up : workspace_.take(Slot::gate_up, {x.size(0), 2 * act.size(1)}, x.scalar_type());
  forward(m, x, bias, both);
  ops::swiglu_forward(both, act, config_.activation);
}

void LayerWeights::backward_input(MatrixRows m, const at::Tensor& dy, const at::Tensor& dx, bool accumulate) const {
  ops::linear_backward_input(dy, dense(m), dx, accumulate);
}

void LayerWeights::ask_ahead(MatrixRows m, bool gated) const {
  ops::linear_ask_ahead(dense(m), gated && config_.has_gated_product(), packed_);
}

void LayerWeights::pack(MatrixRows m, ops::PackedWeights& packed, bool gated) const {
  packed.pack(dense(m), gated && config_.has_gated_product());
}

}  // namespace nemo_rl::model
