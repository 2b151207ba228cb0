#include "model/decoder.h"

#include <cmath>

#include "common/check.h"
#include "ops/embedding.h"
#include "ops/index_tensor.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace nemo_rl::model {
namespace {

std::optional<at::Tensor> optional(const at::Tensor& t) { return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt; }

/// Whether these are all of T rows, in order.
bool are_all(std::span<const std::int64_t> rows, std::int64_t T) {
  if (static_cast<std::int64_t>(rows.size()) != T) return false;
  for (std::int64_t t = 0; t < T; ++t)
    if (rows[static_cast<std::size_t>(t)] != t) return false;
  return true;
}

}  // namespace

RopeTable::RopeTable(const ModelConfig& config, at::Device device)
    : inv_freq_(config.rope_inv_freq), attention_factor_(config.rope_attention_factor), device_(device) {
  NRL_CHECK_ARG(static_cast<std::int64_t>(inv_freq_.size()) == config.head_dim / 2, "rope_inv_freq has ", inv_freq_.size(),
                " entries, expected head_dim / 2 = ", config.head_dim / 2);
}

void RopeTable::reserve(std::int64_t positions) {
  const std::int64_t have = cos_.defined() ? cos_.size(0) : 0, half = static_cast<std::int64_t>(inv_freq_.size());
  if (positions <= have) return;
  const std::int64_t size = std::max<std::int64_t>({positions, 2 * have, 256});
  auto cos = at::empty({size, half}), sin = at::empty({size, half});
  for (std::int64_t p = 0; p < size; ++p)
    for (std::int64_t i = 0; i < half; ++i) {
      // the angle is rounded to float32 first, as transformers does
      const float angle = static_cast<float>(p) * static_cast<float>(inv_freq_[static_cast<std::size_t>(i)]);
      cos.data_ptr<float>()[p * half + i] = static_cast<float>(std::cos(static_cast<double>(angle)) * attention_factor_);
      sin.data_ptr<float>()[p * half + i] = static_cast<float>(std::sin(static_cast<double>(angle)) * attention_factor_);
    }
  cos_ = cos.to(device_);
  sin_ = sin.to(device_);
}

Decoder::Decoder(ModelConfig config, DecoderParameters parameters)
    : config_(std::move(config)), parameters_(std::move(parameters)), rope_(config_, device()) {}

ops::AttentionHeads Decoder::attention_heads() const {
  return {config_.num_heads, config_.num_kv_heads, config_.head_dim, 1.0 / std::sqrt(static_cast<double>(config_.head_dim))};
}

LayerActivations Decoder::buffers(std::int64_t layer, std::int64_t T, bool keep, Workspace& workspace) const {
  const auto S = compute_dtype(), A = accumulate_dtype();
  const std::string prefix = keep ? "layer" + std::to_string(layer) + "." : "layer.";
  auto take = [&](const char* name, at::IntArrayRef shape, at::ScalarType type) { return workspace.take(prefix + name, shape, type); };
  const std::int64_t D = config_.hidden_size, N = config_.num_heads, K = config_.num_kv_heads;
  LayerActivations a;
  a.qkv = take("qkv", {T, config_.qkv_size()}, S);
  if (config_.qk_norm) {
    a.qkv_raw = take("qkv_raw", {T, config_.qkv_size()}, S);
    if (keep) a.q_rstd = take("q_rstd", {T, N}, A), a.k_rstd = take("k_rstd", {T, K}, A);
  }
  a.attn = take("attn", {T, config_.query_size()}, S);
  if (keep) {
    a.gate_up = take("gate_up", {T, 2 * config_.intermediate_size}, S);
    a.rstd_in = take("rstd_in", {T, 1}, A);
    a.lse = take("lse", {T, N}, A);
    a.h_mid = take("h_mid", {T, D}, A);
    a.rstd_mid = take("rstd_mid", {T, 1}, A);
  }
  return a;
}

Decoder::Scratch Decoder::scratch(std::int64_t T, Workspace& workspace) const {
  return {workspace.take("normed", {T, config_.hidden_size}, compute_dtype()), workspace.take("act", {T, config_.intermediate_size}, compute_dtype())};
}

void Decoder::run_attention(std::int64_t layer, const at::Tensor& positions, const Attention& attention, LayerActivations& a,
                            const Scratch& scratch) {
  const auto& p = parameters_.layers[static_cast<std::size_t>(layer)];
  const auto& c = config_;
  const std::int64_t Q = c.query_size(), KV = c.num_kv_heads * c.head_dim;

  ops::linear_ask_ahead(p.qkv_weight);
  ops::rms_norm_forward(a.h_in, p.input_norm, c.rms_norm_eps, scratch.normed, optional(a.rstd_in));
  ops::linear_forward(scratch.normed, p.qkv_weight, optional(p.qkv_bias), c.qk_norm ? a.qkv_raw : a.qkv);
  ops::linear_ask_ahead(p.o_weight);
  if (c.qk_norm) {
    ops::rms_norm_forward(a.qkv_raw.narrow(1, 0, Q), p.q_norm, c.rms_norm_eps, a.qkv.narrow(1, 0, Q), optional(a.q_rstd));
    ops::rms_norm_forward(a.qkv_raw.narrow(1, Q, KV), p.k_norm, c.rms_norm_eps, a.qkv.narrow(1, Q, KV), optional(a.k_rstd));
    a.qkv.narrow(1, Q + KV, KV).copy_(a.qkv_raw.narrow(1, Q + KV, KV));
  }
  ops::rope(a.qkv, c.num_heads + c.num_kv_heads, c.head_dim, positions, rope_.cos(), rope_.sin());
  attention(layer, a.qkv, a.attn, a.lse);
}

/// The attention's output product and the MLP. h_mid holds the residual stream before the layer.
void Decoder::run_mlp(std::int64_t layer, LayerActivations& a, const at::Tensor& h_mid, const at::Tensor& h_out, const Scratch& scratch) {
  const auto& p = parameters_.layers[static_cast<std::size_t>(layer)];
  ops::linear_forward(a.attn, p.o_weight, optional(p.o_bias), h_mid, /*accumulate=*/true);
  ops::linear_ask_ahead(p.gate_up_weight, /*gated=*/true);
  ops::rms_norm_forward(h_mid, p.post_norm, config_.rms_norm_eps, scratch.normed, optional(a.rstd_mid));
  ops::linear_swiglu(scratch.normed, p.gate_up_weight, optional(p.gate_up_bias), a.gate_up, scratch.act);
  ops::linear_ask_ahead(p.down_weight);
  if (!h_out.is_same(h_mid)) h_out.copy_(h_mid);
  ops::linear_forward(scratch.act, p.down_weight, optional(p.down_bias), h_out, /*accumulate=*/true);
}

void Decoder::run_layer(std::int64_t layer, const at::Tensor& positions, const Attention& attention, LayerActivations& a,
                        const at::Tensor& h_out, const Scratch& scratch, bool keep) {
  run_attention(layer, positions, attention, a, scratch);
  if (keep) a.h_mid.copy_(a.h_in);
  run_mlp(layer, a, keep ? a.h_mid : a.h_in, h_out, scratch);
}

/// Positions on the decoder's device, with their angles in the table.
at::Tensor Decoder::places_of(const at::Tensor& positions) {
  if (positions.is_cpu()) rope_.reserve(positions.numel() > 0 ? positions.max().item<std::int64_t>() + 1 : 1);
  return positions.to(device());
}

at::Tensor Decoder::forward(const at::Tensor& token_ids, const at::Tensor& positions, const Attention& attention,
                            std::span<const std::int64_t> rows, Workspace& workspace) {
  const std::int64_t T = token_ids.numel();
  const auto places = places_of(positions);
  const auto h = workspace.take("h", {T, config_.hidden_size}, accumulate_dtype());
  ops::embedding_forward(parameters_.embedding, token_ids, h);
  auto a = buffers(0, T, false, workspace);
  a.h_in = h;
  const auto between = scratch(T, workspace);
  const std::int64_t R = static_cast<std::int64_t>(rows.size()), last = config_.num_layers - 1;
  for (std::int64_t l = 0; l < last; ++l) run_layer(l, places, attention, a, h, between, false);
  run_attention(last, places, attention, a, between);
  if (are_all(rows, T)) {
    run_mlp(last, a, h, h, between);
    return h;
  }
  const auto index = ops::index_tensor(rows.data(), R, h);
  auto attn = workspace.take("rows.attn", {R, config_.query_size()}, compute_dtype());
  auto h_rows = workspace.take("rows.h", {R, config_.hidden_size}, accumulate_dtype());
  at::index_select_out(attn, a.attn, 0, index);
  at::index_select_out(h_rows, h, 0, index);
  a.attn = attn;
  run_mlp(last, a, h_rows, h_rows, scratch(R, workspace));
  return h_rows;
}

at::Tensor Decoder::forward_train(const at::Tensor& token_ids, const at::Tensor& positions, const Attention& attention, bool checkpoint,
                                  Workspace& workspace) {
  const std::int64_t T = token_ids.numel(), D = config_.hidden_size;
  token_ids_ = token_ids;
  positions_ = places_of(positions);
  checkpoint_ = checkpoint;
  kept_ = nullptr;
  saved_.clear();
  auto h = workspace.take("h0", {T, D}, accumulate_dtype());
  ops::embedding_forward(parameters_.embedding, token_ids, h);
  for (std::int64_t l = 0; l < config_.num_layers; ++l) {
    auto a = buffers(checkpoint ? 0 : l, T, true, workspace);
    a.h_in = h;
    h = workspace.take("h" + std::to_string(l + 1), {T, D}, accumulate_dtype());
    run_layer(l, positions_, attention, a, h, scratch(T, workspace), true);
    saved_.push_back(std::move(a));
  }
  return h;
}

KeptActivations Decoder::kept_activations() const {
  Workspace workspace;
  auto a = buffers(0, 1, true, workspace);
  a.h_in = at::empty({1, config_.hidden_size}, accumulate_dtype());
  std::int64_t bytes = 0;
  for (const auto& t : a.all()) bytes += t.defined() ? static_cast<std::int64_t>(t.nbytes()) : 0;
  return {config_.num_layers, bytes, static_cast<std::int64_t>(a.h_in.nbytes())};
}

at::Tensor Decoder::forward_keeping(const at::Tensor& token_ids, const at::Tensor& positions, const Attention& attention,
                                    std::span<const std::int64_t> rows, KeptActivations& kept, std::span<const KeptActivations::Node> nodes,
                                    Workspace& workspace) {
  const std::int64_t T = token_ids.numel(), D = config_.hidden_size;
  const auto places = places_of(positions);
  auto h = workspace.take("h", {T, D}, accumulate_dtype()), next = workspace.take("h.next", {T, D}, accumulate_dtype());
  ops::embedding_forward(parameters_.embedding, token_ids, h);
  auto a = buffers(0, T, true, workspace);
  const auto between = scratch(T, workspace);
  for (std::int64_t l = 0; l < config_.num_layers; ++l) {
    a.h_in = h;
    run_layer(l, places, attention, a, next, between, true);
    kept.put(l, a, nodes);
    std::swap(h, next);
  }
  LayerActivations last;
  last.h_in = h;
  kept.put(config_.num_layers, last, nodes);
  return are_all(rows, T) ? h : h.index_select(0, ops::index_tensor(rows.data(), static_cast<std::int64_t>(rows.size()), h));
}

at::Tensor Decoder::forward_from(const KeptActivations& kept, std::vector<KeptActivations::Node> nodes, const at::Tensor& token_ids,
                                 const at::Tensor& positions, Workspace& workspace) {
  token_ids_ = token_ids;
  positions_ = places_of(positions);
  kept_ = &kept;
  nodes_ = std::move(nodes);
  saved_.clear();
  LayerActivations last;
  last.h_in = workspace.take("h0", {token_ids.numel(), config_.hidden_size}, accumulate_dtype());
  kept.get(config_.num_layers, last, nodes_);
  return last.h_in;
}

/// A layer's activations as its forward left them: saved, kept, or computed again.
LayerActivations Decoder::for_backward(std::int64_t layer, const at::Tensor& dh, const Attention& attention, Workspace& workspace) {
  if (kept_ != nullptr) {
    auto a = buffers(0, dh.size(0), true, workspace);
    a.h_in = workspace.take("layer0.h_in", dh.sizes(), accumulate_dtype());
    kept_->get(layer, a, nodes_);
    return a;
  }
  auto a = saved_[static_cast<std::size_t>(layer)];
  if (checkpoint_ && layer + 1 < config_.num_layers) {  // the last layer's buffers still hold its own
    const auto h_out = workspace.take("recomputed", dh.sizes(), dh.scalar_type());
    run_layer(layer, positions_, attention, a, h_out, scratch(dh.size(0), workspace), true);
  }
  return a;
}

void Decoder::backward(const at::Tensor& dh, const Attention& attention, const AttentionBackward& attention_backward,
                       const DecoderParameters& grads, Workspace& workspace) {
  NRL_CHECK(kept_ != nullptr || static_cast<std::int64_t>(saved_.size()) == config_.num_layers, "backward without a forward_train before it");
  for (std::int64_t l = config_.num_layers - 1; l >= 0; --l) {
    const auto a = for_backward(l, dh, attention, workspace);
    const auto& g = grads.layers[static_cast<std::size_t>(l)];
    backward_mlp(l, a, dh, g, workspace);
    backward_attention(l, a, dh, attention_backward, g, workspace);
  }
  ops::embedding_backward(dh, token_ids_, grads.embedding);
  saved_.clear();
  kept_ = nullptr;
}

at::Tensor Decoder::in_compute_dtype(const at::Tensor& dh, Workspace& workspace) const {
  if (dh.scalar_type() == compute_dtype()) return dh;
  const auto dy = workspace.take("dy", dh.sizes(), compute_dtype());
  dy.copy_(dh);
  return dy;
}

void Decoder::backward_mlp(std::int64_t layer, const LayerActivations& a, const at::Tensor& dh, const LayerParameters& g, Workspace& workspace) {
  const auto& p = parameters_.layers[static_cast<std::size_t>(layer)];
  const std::int64_t T = dh.size(0), D = config_.hidden_size, I = config_.intermediate_size;
  const auto S = compute_dtype();
  const auto dy = in_compute_dtype(dh, workspace);
  const auto act = workspace.take("act", {T, I}, S), d_act = workspace.take("d_act", {T, I}, S);
  ops::swiglu_forward(a.gate_up, act);
  ops::linear_backward_weight(dy, act, g.down_weight);
  if (g.down_bias.defined()) ops::add_column_sums(dy, g.down_bias);
  ops::linear_backward_input(dy, p.down_weight, d_act);
  const auto d_gate_up = workspace.take("d_gate_up", {T, 2 * I}, S);
  ops::swiglu_backward(d_act, a.gate_up, d_gate_up);
  const auto normed = workspace.take("normed", {T, D}, S);
  ops::rms_norm_forward(a.h_mid, p.post_norm, config_.rms_norm_eps, normed, std::nullopt);
  ops::linear_backward_weight(d_gate_up, normed, g.gate_up_weight);
  if (g.gate_up_bias.defined()) ops::add_column_sums(d_gate_up, g.gate_up_bias);
  const auto d_normed = workspace.take("d_normed", {T, D}, accumulate_dtype());
  ops::linear_backward_input(d_gate_up, p.gate_up_weight, d_normed);
  ops::rms_norm_backward(d_normed, a.h_mid, p.post_norm, a.rstd_mid, dh, /*accumulate=*/true, g.post_norm);
}

void Decoder::backward_attention(std::int64_t layer, const LayerActivations& a, const at::Tensor& dh,
                                 const AttentionBackward& attention_backward, const LayerParameters& g, Workspace& workspace) {
  const auto& p = parameters_.layers[static_cast<std::size_t>(layer)];
  const auto& c = config_;
  const std::int64_t T = dh.size(0), D = c.hidden_size, Q = c.query_size(), KV = c.num_kv_heads * c.head_dim;
  const auto S = compute_dtype();
  const auto dy = in_compute_dtype(dh, workspace);
  ops::linear_backward_weight(dy, a.attn, g.o_weight);
  if (g.o_bias.defined()) ops::add_column_sums(dy, g.o_bias);
  const auto d_attn = workspace.take("d_attn", {T, Q}, S);
  ops::linear_backward_input(dy, p.o_weight, d_attn);
  auto d_qkv = workspace.take("d_qkv", {T, c.qkv_size()}, S);
  attention_backward(a.qkv, a.attn, d_attn, a.lse, d_qkv);
  ops::rope(d_qkv, c.num_heads + c.num_kv_heads, c.head_dim, positions_, rope_.cos(), rope_.sin(), /*inverse=*/true);
  if (c.qk_norm) {
    const auto d_q = d_qkv.narrow(1, 0, Q), d_k = d_qkv.narrow(1, Q, KV);
    ops::rms_norm_backward(d_q, a.qkv_raw.narrow(1, 0, Q), p.q_norm, a.q_rstd, d_q, false, g.q_norm);
    ops::rms_norm_backward(d_k, a.qkv_raw.narrow(1, Q, KV), p.k_norm, a.k_rstd, d_k, false, g.k_norm);
  }
  const auto normed = workspace.take("normed", {T, D}, S);
  ops::rms_norm_forward(a.h_in, p.input_norm, c.rms_norm_eps, normed, std::nullopt);
  ops::linear_backward_weight(d_qkv, normed, g.qkv_weight);
  if (g.qkv_bias.defined()) ops::add_column_sums(d_qkv, g.qkv_bias);
  const auto d_normed = workspace.take("d_normed", {T, D}, accumulate_dtype());
  ops::linear_backward_input(d_qkv, p.qkv_weight, d_normed);
  ops::rms_norm_backward(d_normed, a.h_in, p.input_norm, a.rstd_in, dh, /*accumulate=*/true, g.input_norm);
}

void Decoder::final_norm(const at::Tensor& h, const at::Tensor& y, const at::Tensor& rstd) const {
  ops::rms_norm_forward(h, parameters_.final_norm, config_.rms_norm_eps, y, optional(rstd));
}

}  // namespace nemo_rl::model
