#include "model/mlp.h"

#include "model/experts_beside_mlp.h"
#include "ops/embedding.h"
#include "ops/swiglu.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

/// down · (f(gate · x) · (up · x)), or down · f(up · x) without a gate; f by ModelConfig::activation.
class DenseMlp : public Mlp {
 public:
  explicit DenseMlp(const ModelConfig& config) : c_(config) {}

  std::vector<LayerTensor> tensors() const override {
    using P = LayerParameters;
    const std::int64_t D = c_.hidden_size, I = c_.intermediate_size;
    constexpr int kRows = 0, kColumns = 1, kWhole = ParameterSpec::kWhole;
    std::vector<LayerTensor> all;
    if (c_.fused_gate_up) all.push_back({&P::gate_up_weight, {{"mlp.gate_up_proj.weight", 2 * I}}, D, kRows});
    else if (!kernels::has_gate(c_.activation))
      all.push_back({&P::gate_up_weight, {{"mlp.up_proj.weight", I}}, D, kRows});
    else all.push_back({&P::gate_up_weight, {{"mlp.gate_proj.weight", I}, {"mlp.up_proj.weight", I}}, D, kRows});
    if (c_.mlp_bias) all.push_back({&P::gate_up_bias, {{"mlp.gate_proj.bias", I}, {"mlp.up_proj.bias", I}}, 0, kRows});
    all.push_back({&P::down_weight, {{"mlp.down_proj.weight", D}}, I, kColumns});
    if (c_.mlp_bias) all.push_back({&P::down_bias, {{"mlp.down_proj.bias", D}}, 0, kWhole});
    return all;
  }

  Kept kept() const override { return {c_.up_rows(c_.intermediate_size), 0}; }

  void pack(const LayerWeights& w, ops::PackedWeights& packed) const override {
    w.pack(&LayerParameters::down_weight, packed);
    w.pack(&LayerParameters::gate_up_weight, packed, /*gated=*/true);
  }

  void ask_ahead(const LayerWeights& w) const override {
    w.ask_ahead(&LayerParameters::gate_up_weight, /*gated=*/true);
  }

  void forward(const LayerWeights& w, const at::Tensor& x, const at::Tensor& y, bool accumulate,
               const LayerActivations& a, Workspace& workspace) const override {
    const auto act = workspace.take(Slot::act, {x.size(0), c_.intermediate_size}, x.scalar_type());
    w.gated_product(&LayerParameters::gate_up_weight, x, w.tensors().gate_up_bias, a.gate_up, act);
    w.ask_ahead(&LayerParameters::down_weight);
    // of several slices the first adds the bias
    w.forward(&LayerParameters::down_weight, act, c_.slice.rank == 0 ? w.tensors().down_bias : at::Tensor(), y,
              accumulate);
  }

  void backward(const LayerWeights& w, const std::function<at::Tensor()>& x, const at::Tensor& dy,
                const LayerActivations& a, const at::Tensor& d_x, const LayerGradients& grads, Workspace& workspace,
                ops::ExpertBalance* /*balance*/) const override {
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
    w.backward_input(&LayerParameters::down_weight, dy, d_act);
    const auto d_gate_up = workspace.take(Slot::d_gate_up, {T, c_.up_rows(I)}, S);
    ops::swiglu_backward(d_act, a.gate_up, d_gate_up, c_.activation);
    if (grads.wants(&LayerParameters::gate_up_weight))
      grads.add(&LayerParameters::gate_up_weight, d_gate_up, x(), workspace);
    if (g.gate_up_bias.defined()) ops::add_column_sums(d_gate_up, g.gate_up_bias);
    w.backward_input(&LayerParameters::gate_up_weight, d_gate_up, d_x);
  }

 private:
  ModelConfig c_;
};

}  // namespace

std::unique_ptr<Mlp> mlp_of(const ModelConfig& config, std::int64_t l) {
  const auto& layer = config.layers[static_cast<std::size_t>(l)];
  if (!layer.has_mlp) return nullptr;
  if (layer.has_experts && config.experts.beside_mlp) return std::make_unique<ExpertsBesideMlp>(config);
  if (layer.has_experts) return std::make_unique<Experts>(config);
  return std::make_unique<DenseMlp>(config.of_layer(l));
}

}  // namespace nemo_rl::model
