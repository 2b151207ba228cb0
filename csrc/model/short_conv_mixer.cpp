#include "model/short_conv_mixer.h"

#include <ATen/ops/mul.h>

#include "common/check.h"

namespace nemo_rl::model {

ShortConvMixer::ShortConvMixer(const ModelConfig& config, std::int64_t layer)
    : hidden_(config.hidden_size), layer_(layer), width_(config.recurrent.conv_width) {
  NRL_CHECK_ARG(
      hidden_ % 16 == 0 && config.recurrent.conv_size() == hidden_ && width_ >= 1 && width_ <= kernels::kMostConvWidth,
      "a convolution of ", hidden_, " channels over ", width_, " tokens: expected a multiple of 16, and at most ",
      kernels::kMostConvWidth, " tokens");
}

std::vector<LayerTensor> ShortConvMixer::tensors() const {
  using P = LayerParameters;
  LayerTensor conv{&P::conv_weight, {{"conv.conv.weight", hidden_}}, width_};
  conv.takes_adapters = false, conv.is_depthwise = true;
  return {{&P::qkv_weight, {{"conv.in_proj.weight", 3 * hidden_}}, hidden_},
          conv,
          {&P::o_weight, {{"conv.out_proj.weight", hidden_}}, hidden_}};
}

/// B · x. Its buffer is that of the result, which is computed after the convolution.
at::Tensor ShortConvMixer::conv_input(const LayerActivations& a, Workspace& workspace) const {
  auto u = workspace.take(Slot::mixed, a.qkv.sizes(), a.qkv.scalar_type());
  return at::mul_out(u, part(a.qkv_raw, 0), part(a.qkv_raw, 2));
}

at::Tensor ShortConvMixer::forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                                   const MixerStep& step) const {
  const auto slots = step.history.state ? step.history.state(layer_) : RecurrentState{};
  const auto& p = w.tensors();
  w.forward(&LayerParameters::qkv_weight, x, {}, a.qkv_raw);
  w.ask_ahead(&LayerParameters::o_weight);
  ops::short_conv_forward(conv_input(a, step.workspace), {p.conv_weight, {}, /*silu=*/false}, step.history.sequences,
                          a.qkv, slots.inputs);
  return result(p, a, step.workspace);
}

at::Tensor ShortConvMixer::result(const LayerParameters&, const LayerActivations& a, Workspace& workspace) const {
  auto y = workspace.take(Slot::mixed, a.qkv.sizes(), a.qkv.scalar_type());
  return at::mul_out(y, part(a.qkv_raw, 1), a.qkv);
}

at::Tensor ShortConvMixer::backward(const LayerWeights& w, const at::Tensor& d_result, const LayerActivations& a,
                                    const LayerGradients& grads, const MixerStep& step) const {
  const auto d_row = step.workspace.take(Slot::d_mixer_raw, a.qkv_raw.sizes(), d_result.scalar_type());
  auto d_input = part(d_row, 0), d_gate = part(d_row, 1), d_x = part(d_row, 2);
  at::mul_out(d_gate, d_result, a.qkv);
  d_result.mul_(part(a.qkv_raw, 1));
  ops::short_conv_backward(d_result, conv_input(a, step.workspace), {w.tensors().conv_weight, {}, /*silu=*/false},
                           step.history.sequences, d_input, {grads.dense().conv_weight, {}});
  at::mul_out(d_x, d_input, part(a.qkv_raw, 0));
  d_input.mul_(part(a.qkv_raw, 2));
  return d_row;
}

}  // namespace nemo_rl::model
