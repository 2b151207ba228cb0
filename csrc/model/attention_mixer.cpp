#include "model/attention_mixer.h"

#include "model/latent_attention.h"
#include "model/recurrent_mixer.h"
#include "model/short_conv_mixer.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {

AttentionMixer::AttentionMixer(const ModelConfig& config, std::int64_t layer)
    : c_(config.of_layer(layer)),
      layer_(layer),
      own_(config.layers[static_cast<std::size_t>(layer)]),
      raw_heads_(own_.keys_of != LayerConfig::kOwn ? 0
                 : own_.values_are_keys            ? 1
                                                   : 2) {
  const auto source = own_.keys_of == LayerConfig::kOwn ? static_cast<int>(layer) : own_.keys_of;
  for (std::int64_t l = 0; l < config.num_layers(); ++l)
    if (config.layers[static_cast<std::size_t>(l)].keys_of == source) last_reader_ = l;
}

std::vector<LayerTensor> AttentionMixer::tensors() const {
  using P = LayerParameters;
  const auto& c = c_;
  const std::int64_t D = c.hidden_size, Q = c.query_size(), KV = key_size();
  constexpr int kRows = 0, kColumns = 1, kWhole = ParameterSpec::kWhole;
  std::vector<LayerTensor> all;
  if (c.fused_qkv) all.push_back({&P::qkv_weight, {{"self_attn.qkv_proj.weight", Q + 2 * KV}}, D, kRows});
  else {
    std::vector<LayerTensor::Part> parts{{"self_attn.q_proj.weight", c.output_gate ? 2 * Q : Q}};
    if (raw_heads_ > 0) parts.push_back({"self_attn.k_proj.weight", KV});
    if (raw_heads_ > 1) parts.push_back({"self_attn.v_proj.weight", KV});
    all.push_back({.field = &P::qkv_weight,
                   .parts = std::move(parts),
                   .columns = D,
                   .split = kRows,
                   .rest = raw_heads_ > 1 ? 1 : 0,  // v_proj: small, but in 4 bits it causes a third of all divergence
                   .in_8_bits = raw_heads_ > 1});
  }
  if (c.qkv_bias)
    all.push_back({&P::qkv_bias,
                   {{"self_attn.q_proj.bias", Q}, {"self_attn.k_proj.bias", KV}, {"self_attn.v_proj.bias", KV}},
                   0,
                   kRows});
  if (c.qk_norm != QkNorm::none) {
    const bool whole = c.qk_norm == QkNorm::whole;
    all.push_back({&P::q_norm, {{"self_attn.q_norm.weight", whole ? Q : c.head_dim}}, 0, kWhole});
    if (raw_heads_ > 0) all.push_back({&P::k_norm, {{"self_attn.k_norm.weight", whole ? KV : c.head_dim}}, 0, kWhole});
  }
  if (c.attention_sinks) all.push_back({&P::sinks, {{"self_attn.sinks", c.num_heads}}, 0, kRows});
  all.push_back({&P::o_weight, {{"self_attn.o_proj.weight", D}}, Q, kColumns});
  if (c.output_bias) all.push_back({&P::o_bias, {{"self_attn.o_proj.bias", D}}, 0, kWhole});
  return all;
}

Mixer::Kept AttentionMixer::kept() const {
  Kept kept{c_.qk_norm == QkNorm::none ? 0 : raw_size(), c_.qkv_size(), c_.query_size(), 0, 0, c_.num_heads};
  if (c_.qk_norm == QkNorm::head) kept.q_rstd = c_.num_heads, kept.k_rstd = c_.num_kv_heads;
  if (c_.qk_norm == QkNorm::whole) kept.q_rstd = kept.k_rstd = 1;
  if (c_.value_norm) kept.v_rstd = c_.num_kv_heads;
  if (raw_heads_ == 0) kept.k_rstd = kept.v_rstd = 0;
  return kept;
}

/// Up to the attention's result: a.qkv, a.attn, a.lse.
at::Tensor AttentionMixer::forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                                   const MixerStep& step) const {
  w.forward(&LayerParameters::qkv_weight, x, w.tensors().qkv_bias, c_.qk_norm == QkNorm::none ? a.qkv : a.qkv_raw);
  w.ask_ahead(&LayerParameters::o_weight);
  if (c_.qk_norm != QkNorm::none) normalise_heads(w.tensors(), a);
  rotate(a.qkv, step, /*inverse=*/false);
  if (last_reader_ != LayerConfig::kOwn) {
    const auto own = a.qkv.narrow(1, c_.query_size(), 2 * key_size());
    const auto source = raw_heads_ > 0 ? layer_ : own_.keys_of;
    const auto T = step.rows.index.defined() ? step.rows.T : a.qkv.size(0);
    const auto shared = keys_values(source, LayerSlot::keys_values, T, a.qkv.scalar_type(), step.workspace);
    if (raw_heads_ > 0) shared.copy_(own);
    else own.copy_(step.rows.index.defined() ? shared.index_select(0, step.rows.index) : shared);
  }
  step.history.attention(layer_, a.qkv, a.attn, a.lse);
  return result(w.tensors(), a, step.workspace);
}

at::Tensor AttentionMixer::result(const LayerParameters&, const LayerActivations& a, Workspace& workspace) const {
  if (!c_.output_gate) return a.attn;
  const auto y = workspace.take(Slot::mixed, a.attn.sizes(), a.attn.scalar_type());
  ops::head_gate_forward(a.attn, query_part(a.qkv_raw, 1), y);
  return y;
}

at::Tensor AttentionMixer::query_part(const at::Tensor& raw, std::int64_t which) const {
  const std::int64_t H = c_.head_dim;
  return raw.narrow(1, 0, 2 * c_.query_size()).unflatten(1, {c_.num_heads, 2 * H}).narrow(2, which * H, H);
}

at::Tensor AttentionMixer::keys_values(std::int64_t of, LayerSlot slot, std::int64_t T, at::ScalarType type,
                                       Workspace& workspace) const {
  return workspace.take(of, slot, {T, 2 * key_size()}, type);
}

void AttentionMixer::rotate(const at::Tensor& qkv, const MixerStep& step, bool inverse) const {
  if (step.rope == nullptr) return;
  const auto heads = c_.num_heads + (raw_heads_ > 0 ? c_.num_kv_heads : 0);  // keys of another layer are rotated there
  ops::rope(qkv, heads, c_.head_dim, step.rows.positions, step.rope->cos(), step.rope->sin(), inverse,
            c_.rope_interleaved);
}

void AttentionMixer::normalise(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y,
                               const at::Tensor& rstd) const {
  ops::rms_norm_forward(x, weight, c_.rms_norm_eps, c_.norm_offset, y, if_defined(rstd));
}

/// qkv_raw -> qkv: queries and keys normalised, and values in Gemma 4.
void AttentionMixer::normalise_heads(const LayerParameters& p, LayerActivations& a) const {
  const std::int64_t Q = c_.query_size(), KV = key_size();
  auto queries = a.qkv_raw.narrow(1, 0, Q);
  if (c_.output_gate) {
    queries = a.qkv.narrow(1, 0, Q);
    queries.unflatten(1, {c_.num_heads, c_.head_dim}).copy_(query_part(a.qkv_raw, 0));
  }
  normalise(queries, p.q_norm, a.qkv.narrow(1, 0, Q), a.q_rstd);
  if (raw_heads_ == 0) return;
  const auto raw_keys = a.qkv_raw.narrow(1, raw_size() - raw_heads_ * KV, KV), values = a.qkv.narrow(1, Q + KV, KV),
             raw_values = a.qkv_raw.narrow(1, raw_size() - KV, KV);
  normalise(raw_keys, p.k_norm, a.qkv.narrow(1, Q, KV), a.k_rstd);
  if (c_.value_norm) ops::rms_norm_forward(raw_values, ones(a.qkv), c_.rms_norm_eps, 0, values, if_defined(a.v_rstd));
  else values.copy_(raw_values);
}

/// A norm's weight that changes nothing.
at::Tensor AttentionMixer::ones(const at::Tensor& like) const { return at::ones({c_.head_dim}, like.options()); }

/// The queries before their norm, side by side.
at::Tensor AttentionMixer::raw_queries(const LayerActivations& a, Workspace& workspace) const {
  const std::int64_t Q = c_.query_size(), T = a.qkv_raw.size(0);
  if (!c_.output_gate) return a.qkv_raw.narrow(1, 0, Q);
  const auto queries = workspace.take(Slot::mixed, {T, Q}, a.qkv_raw.scalar_type());
  queries.view({T, c_.num_heads, c_.head_dim}).copy_(query_part(a.qkv_raw, 0));
  return queries;
}

/// Moves the gradients of another layer's keys and values to its sum, or adds this layer's sum to d_qkv. Layers come in
/// descending order.
void AttentionMixer::share_gradients(const at::Tensor& d_qkv, Workspace& workspace) const {
  if (last_reader_ == LayerConfig::kOwn) return;
  const auto own = d_qkv.narrow(1, c_.query_size(), 2 * key_size());
  const auto sums = d_qkv.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const auto shared =
      keys_values(raw_heads_ > 0 ? layer_ : own_.keys_of, LayerSlot::d_keys_values, d_qkv.size(0), sums, workspace);
  if (raw_heads_ > 0) own.add_(shared);
  else if (layer_ == last_reader_) shared.copy_(own);
  else shared.add_(own);
}

at::Tensor AttentionMixer::backward(const LayerWeights& w, const at::Tensor& d_result, const LayerActivations& a,
                                    const LayerGradients& grads, const MixerStep& step) const {
  const auto &p = w.tensors(), &g = grads.dense();
  const std::int64_t T = d_result.size(0), Q = c_.query_size(), KV = key_size();
  const auto S = d_result.scalar_type();
  at::Tensor d_raw;
  if (c_.output_gate) {
    d_raw = step.workspace.take(Slot::d_mixer_raw, {T, raw_size()}, S);
    ops::head_gate_backward(d_result, a.attn, query_part(a.qkv_raw, 1), d_result, query_part(d_raw, 1));
  }
  auto d_qkv = step.workspace.take(Slot::d_qkv, {T, c_.qkv_size()}, S);
  step.history.attention_backward(layer_, a.qkv, a.attn, d_result, a.lse, d_qkv);
  if (g.sinks.defined()) {
    ops::AttentionHeads heads{c_.num_heads, c_.num_kv_heads, c_.head_dim};
    heads.sinks = p.sinks;
    ops::attention_sinks_backward(a.attn, d_result, a.lse, heads, g.sinks);
  }
  share_gradients(d_qkv, step.workspace);
  rotate(d_qkv, step, /*inverse=*/true);
  if (c_.qk_norm != QkNorm::none) {
    const auto d_q = d_qkv.narrow(1, 0, Q), d_k = d_qkv.narrow(1, Q, KV), d_v = d_qkv.narrow(1, Q + KV, KV);
    ops::rms_norm_backward(d_q, raw_queries(a, step.workspace), p.q_norm, c_.norm_offset, a.q_rstd, d_q, false,
                           g.q_norm);
    if (raw_heads_ == 0) return d_q;
    const auto raw_keys = a.qkv_raw.narrow(1, raw_size() - raw_heads_ * KV, KV),
               raw_values = a.qkv_raw.narrow(1, raw_size() - KV, KV);
    ops::rms_norm_backward(d_k, raw_keys, p.k_norm, c_.norm_offset, a.k_rstd, d_k, false, g.k_norm);
    if (c_.value_norm)
      ops::rms_norm_backward(d_v, raw_values, ones(d_v), 0, a.v_rstd, raw_heads_ > 1 ? d_v : d_k, raw_heads_ == 1, {});
  }
  if (!c_.output_gate) return d_qkv.narrow(1, 0, raw_size());
  query_part(d_raw, 0).copy_(d_qkv.narrow(1, 0, Q).unflatten(1, {c_.num_heads, c_.head_dim}));
  d_raw.narrow(1, 2 * Q, 2 * KV).copy_(d_qkv.narrow(1, Q, 2 * KV));
  return d_raw;
}

std::unique_ptr<Mixer> mixer_of(const ModelConfig& config, std::int64_t l) {
  const auto& layer = config.layers[static_cast<std::size_t>(l)];
  if (!layer.has_mixer) return nullptr;
  if (layer.is_recurrent && config.recurrent.rule == kernels::Recurrence::none)
    return std::make_unique<ShortConvMixer>(config, l);
  if (layer.is_recurrent) return std::make_unique<RecurrentMixer>(config, l);
  if (config.latent) return std::make_unique<LatentAttention>(config, l);
  return std::make_unique<AttentionMixer>(config, l);
}

}  // namespace nemo_rl::model
