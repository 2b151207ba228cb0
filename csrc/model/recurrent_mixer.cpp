#include "model/recurrent_mixer.h"

#include "runtime/tensor.h"

namespace nemo_rl::model {

RecurrentMixer::RecurrentMixer(const ModelConfig& config, std::int64_t layer)
    : hidden_(config.hidden_size), layer_(layer), eps_(config.rms_norm_eps), shape_(config.recurrent) {
  ops::check_shape(shape_);
}

std::vector<LayerTensor> RecurrentMixer::tensors() const {
  using P = LayerParameters;
  const std::int64_t V = shape_.value_size(), U = shape_.value_heads, C = shape_.conv_size();
  const std::string module = shape_.is_mamba2() ? "mamba." : "linear_attn.";
  LayerTensor conv{&P::conv_weight, {{module + "conv1d.weight", C}}, shape_.conv_width};
  conv.takes_adapters = false, conv.is_depthwise = true;
  if (shape_.is_mamba2())
    return {{&P::qkv_weight, {{"mamba.in_proj.weight", shape_.projection_size()}}, hidden_},
            conv,
            {&P::conv_bias, {{"mamba.conv1d.bias", C}}},
            {&P::A_log, {{"mamba.A_log", U}}},
            {&P::dt_bias, {{"mamba.dt_bias", U}}},
            {&P::skip, {{"mamba.D", U}}},
            {&P::gated_norm, {{"mamba.norm.weight", V}}},
            {&P::o_weight, {{"mamba.out_proj.weight", hidden_}}, V}};
  LayerTensor projection{&P::qkv_weight,
                         {{"linear_attn.in_proj_qkv.weight", C},
                          {"linear_attn.in_proj_z.weight", V},
                          {"linear_attn.in_proj_b.weight", U},
                          {"linear_attn.in_proj_a.weight", U}},
                         hidden_};
  projection.rest = 2;  // the gates: small matrices, whose errors would accumulate in the state
  return {projection,
          conv,
          {&P::A_log, {{"linear_attn.A_log", U}}},
          {&P::dt_bias, {{"linear_attn.dt_bias", U}}},
          {&P::gated_norm, {{"linear_attn.norm.weight", shape_.value_dim}}},
          {&P::o_weight, {{"linear_attn.out_proj.weight", hidden_}}, V}};
}

Mixer::Kept RecurrentMixer::kept() const {
  return {shape_.projection_size(), shape_.conv_size(), shape_.value_size(), 0, 0, 0};
}

ops::RecurrenceInputs RecurrentMixer::inputs(const LayerParameters& p, const at::Tensor& qkv,
                                             const at::Tensor& row) const {
  const std::int64_t U = shape_.value_heads, begin = shape_.conv_size() + shape_.value_size();
  if (shape_.is_mamba2()) return {qkv, {}, row.narrow(1, begin, U), p.A_log, p.dt_bias, p.skip};
  return {qkv, row.narrow(1, begin, U), row.narrow(1, begin + U, U), p.A_log, p.dt_bias, {}};
}

at::Tensor RecurrentMixer::forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                                   const MixerStep& step) const {
  const auto& sequences = step.history.sequences;
  const auto slots = step.history.state ? step.history.state(layer_) : RecurrentState{};
  const auto& p = w.tensors();
  w.forward(&LayerParameters::qkv_weight, x, {}, a.qkv_raw);
  w.ask_ahead(&LayerParameters::o_weight);
  ops::short_conv_forward(conv_part(a.qkv_raw), {p.conv_weight, p.conv_bias}, sequences, a.qkv, slots.inputs);
  ops::recurrence_forward(inputs(p, a.qkv, a.qkv_raw), sequences, shape_, a.attn, slots.state);
  return result(p, a, step.workspace);
}

at::Tensor RecurrentMixer::result(const LayerParameters& p, const LayerActivations& a, Workspace& workspace) const {
  const auto y = workspace.take(Slot::mixed, a.attn.sizes(), a.attn.scalar_type());
  ops::gated_norm_forward(a.attn, gate_part(a.qkv_raw), p.gated_norm, norm_groups(), eps_, y);
  return y;
}

at::Tensor RecurrentMixer::backward(const LayerWeights& w, const at::Tensor& d_result, const LayerActivations& a,
                                    const LayerGradients& grads, const MixerStep& step) const {
  const auto &p = w.tensors(), &g = grads.dense();
  const auto& sequences = step.history.sequences;
  const auto S = d_result.scalar_type();
  const auto d_row = step.workspace.take(Slot::d_mixer_raw, a.qkv_raw.sizes(), S);
  const auto d_qkv = step.workspace.take(Slot::d_qkv, a.qkv.sizes(), S);
  ops::gated_norm_backward(d_result, a.attn, gate_part(a.qkv_raw), p.gated_norm, norm_groups(), eps_, d_result,
                           gate_part(d_row), g.gated_norm);
  auto d = inputs(p, d_qkv, d_row);
  d.A_log = g.A_log, d.dt_bias = g.dt_bias, d.D = g.skip;
  ops::recurrence_backward(d_result, inputs(p, a.qkv, a.qkv_raw), sequences, shape_, d);
  ops::short_conv_backward(d_qkv, conv_part(a.qkv_raw), {p.conv_weight, p.conv_bias}, sequences, conv_part(d_row),
                           {g.conv_weight, g.conv_bias});
  return d_row;
}

}  // namespace nemo_rl::model
