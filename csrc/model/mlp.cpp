#include "model/mlp.h"

#include "model/experts.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/swiglu.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

/// down · (f(gate · x) · (up · x)), f by ModelConfig::activation.
class DenseMlp : public Mlp {
 public:
  explicit DenseMlp(const ModelConfig& config) : c_(config) {}

  std::vector<LayerTensor> tensors() const override {
    using P = LayerParameters;
    const std::int64_t D = c_.hidden_size, I = c_.intermediate_size;
    constexpr int kRows = 0, kColumns = 1, kWhole = ParameterSpec::kWhole;
    std::vector<LayerTensor> all;
    if (c_.fused_tensors) all.push_back({&P::gate_up_weight, {{"mlp.gate_up_proj.weight", 2 * I}}, D, kRows});
    else all.push_back({&P::gate_up_weight, {{"mlp.gate_proj.weight", I}, {"mlp.up_proj.weight", I}}, D, kRows});
    if (c_.mlp_bias) all.push_back({&P::gate_up_bias, {{"mlp.gate_proj.bias", I}, {"mlp.up_proj.bias", I}}, 0, kRows});
    all.push_back({&P::down_weight, {{"mlp.down_proj.weight", D}}, I, kColumns});
    if (c_.mlp_bias) all.push_back({&P::down_bias, {{"mlp.down_proj.bias", D}}, 0, kWhole});
    return all;
  }

  Kept kept() const override { return {2 * c_.intermediate_size, 0}; }

  void pack(const LayerParameters& p, ops::PackedWeights& packed) const override {
    packed.pack(p.down_weight, /*gated=*/false);
    packed.pack(p.gate_up_weight, c_.has_gated_product());
  }

  void ask_ahead(const LayerParameters& p, const ops::PackedWeights* packed) const override {
    ops::linear_ask_ahead(p.gate_up_weight, c_.has_gated_product(), packed);
  }

  void forward(const LayerParameters& p, const at::Tensor& x, const at::Tensor& y, bool accumulate,
               const LayerActivations& a, const MlpScratch& s) const override {
    gated_product(c_, x, p.gate_up_weight, p.gate_up_bias, a.gate_up.defined() ? a.gate_up : s.gate_up, s.act,
                  s.packed);
    ops::linear_ask_ahead(p.down_weight, /*gated=*/false, s.packed);
    // of several slices the first adds the bias
    ops::linear_forward(s.act, p.down_weight, c_.slice.rank == 0 ? if_defined(p.down_bias) : std::nullopt, y,
                        accumulate, s.packed);
  }

  void backward(const LayerParameters& p, const std::function<at::Tensor()>& x, const at::Tensor& dy,
                const LayerActivations& a, const at::Tensor& d_x, const LayerGradients& grads,
                Workspace& workspace) const override {
    const auto& g = grads.dense();
    const std::int64_t T = dy.size(0), I = c_.intermediate_size;
    const auto S = dy.scalar_type();
    const auto d_act = workspace.take(Slot::d_act, {T, I}, S);
    if (grads.wants(&LayerParameters::down_weight)) {
      const auto act = workspace.take(Slot::act, {T, I}, S);
      ops::swiglu_forward(a.gate_up, act, c_.activation);
      grads.add(&LayerParameters::down_weight, dy, act, workspace);
    }
    if (g.down_bias.defined()) ops::add_column_sums(dy, g.down_bias);
    ops::linear_backward_input(dy, p.down_weight, d_act);
    const auto d_gate_up = workspace.take(Slot::d_gate_up, {T, 2 * I}, S);
    ops::swiglu_backward(d_act, a.gate_up, d_gate_up, c_.activation);
    if (grads.wants(&LayerParameters::gate_up_weight))
      grads.add(&LayerParameters::gate_up_weight, d_gate_up, x(), workspace);
    if (g.gate_up_bias.defined()) ops::add_column_sums(d_gate_up, g.gate_up_bias);
    ops::linear_backward_input(d_gate_up, p.gate_up_weight, d_x);
  }

 private:
  ModelConfig c_;
};

}  // namespace

void gated_product(const ModelConfig& config, const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                   const at::Tensor& gate_up, const at::Tensor& act, const ops::PackedWeights* packed) {
  if (config.has_gated_product()) return ops::linear_swiglu(x, w, if_defined(bias), gate_up, act, packed);
  ops::linear_forward(x, w, if_defined(bias), gate_up, /*accumulate=*/false, packed);
  ops::swiglu_forward(gate_up, act, config.activation);
}

std::unique_ptr<Mlp> mlp_of(const ModelConfig& config, std::int64_t l) {
  if (config.layers[static_cast<std::size_t>(l)].has_experts) return std::make_unique<Experts>(config);
  return std::make_unique<DenseMlp>(config);
}

}  // namespace nemo_rl::model
