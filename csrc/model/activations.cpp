#include "model/activations.h"

#include <tuple>

namespace nemo_rl::model {
namespace {

enum class Keep { nothing, for_backward };

/// The buffers of layer `l` but h_in, in the memory of the layer `place`.
LayerActivations buffers(const Decoder& decoder, std::int64_t l, std::int64_t place, std::int64_t T, Keep keep,
                         Workspace& workspace) {
  const auto& c = decoder.config();
  const auto S = decoder.compute_dtype(), A = decoder.accumulate_dtype();
  const auto take = [&](LayerSlot slot, std::int64_t columns, at::ScalarType type) {
    return workspace.take(place, slot, {T, columns}, type);
  };
  LayerActivations a;
  const auto& kind = c.layers[static_cast<std::size_t>(l)];
  const auto mixer = kind.has_mixer ? decoder.mixer(l).kept() : Mixer::Kept{};
  if (mixer.qkv > 0) a.qkv = take(LayerSlot::qkv, mixer.qkv, S);
  if (mixer.qkv_raw > 0) a.qkv_raw = take(LayerSlot::qkv_raw, mixer.qkv_raw, S);
  if (mixer.attn > 0) a.attn = take(LayerSlot::attn, mixer.attn, S);
  if (keep == Keep::nothing) return a;
  if (mixer.q_rstd > 0) a.q_rstd = take(LayerSlot::q_rstd, mixer.q_rstd, A);
  if (mixer.k_rstd > 0) a.k_rstd = take(LayerSlot::k_rstd, mixer.k_rstd, A);
  if (mixer.v_rstd > 0) a.v_rstd = take(LayerSlot::v_rstd, mixer.v_rstd, A);
  const auto branch = [&](bool has_norm, LayerSlot out, LayerSlot rstd) {
    return has_norm ? Branch{take(out, c.hidden_size, A), take(rstd, 1, A)} : Branch{};
  };
  if (kind.has_mixer) {
    if (!c.norms.before_attention.empty()) a.rstd_in = take(LayerSlot::rstd_in, 1, A);
    if (mixer.lse > 0) a.lse = take(LayerSlot::lse, mixer.lse, A);
    a.attn_branch = branch(!c.norms.after_attention.empty(), LayerSlot::attn_branch, LayerSlot::attn_branch_rstd);
  }
  if (!kind.has_mlp) return a;
  const auto mlp = decoder.mlp(l).kept();
  a.gate_up = take(LayerSlot::gate_up, mlp.gate_up, S);
  if (mlp.shared_gate_up > 0) a.shared_gate_up = take(LayerSlot::shared_gate_up, mlp.shared_gate_up, S);
  if (mlp.latent > 0) a.latent = take(LayerSlot::latent, mlp.latent, S);
  a.shared_branch = branch(mlp.has_branches, LayerSlot::shared_branch, LayerSlot::shared_branch_rstd);
  a.experts_branch = branch(mlp.has_branches, LayerSlot::experts_branch, LayerSlot::experts_branch_rstd);
  if (kind.has_mixer) a.h_mid = take(LayerSlot::h_mid, c.hidden_size, A);
  if (!c.norms.before_mlp.empty()) a.rstd_mid = take(LayerSlot::rstd_mid, 1, A);
  a.mlp_branch = branch(!c.norms.after_mlp.empty(), LayerSlot::mlp_branch, LayerSlot::mlp_branch_rstd);
  if (c.per_layer_input == 0) return a;
  a.h_per_layer = take(LayerSlot::h_per_layer, c.hidden_size, A);
  a.per_layer = take(LayerSlot::per_layer, 2 * c.per_layer_input, S);
  a.per_layer_branch =
      branch(!c.norms.after_per_layer.empty(), LayerSlot::per_layer_branch, LayerSlot::per_layer_branch_rstd);
  return a;
}

/// The first layer whose buffers have the shapes of those of layer `l`.
std::size_t first_alike(const Decoder& decoder, std::int64_t l) {
  const auto shape = [](const LayerConfig& layer) {
    return std::tuple(layer.has_experts, layer.is_recurrent, layer.has_mixer, layer.has_mlp, layer.head_dim,
                      layer.num_kv_heads, layer.intermediate_size, layer.values_are_keys,
                      layer.keys_of == LayerConfig::kOwn);
  };
  const auto& layers = decoder.config().layers;
  std::size_t first = 0;
  while (shape(layers[first]) != shape(layers[static_cast<std::size_t>(l)])) ++first;
  return first;
}

at::Tensor stream_of(const Decoder& decoder, std::int64_t layer, std::int64_t T, Workspace& workspace) {
  return workspace.take(layer, LayerSlot::h_in, {T, decoder.config().hidden_size}, decoder.accumulate_dtype());
}

}  // namespace

NothingKept::NothingKept(const Decoder& decoder, std::int64_t T, Workspace& workspace)
    : decoder_(decoder),
      workspace_(workspace),
      h_(workspace.take(Slot::h, {T, decoder.config().hidden_size}, decoder.accumulate_dtype())),
      shared_(decoder.config().layers.size()) {}

LayerActivations NothingKept::layer(std::int64_t l) {
  auto& shared = shared_[first_alike(decoder_, l)];
  if (!shared.qkv.defined()) shared = buffers(decoder_, l, 0, h_.size(0), Keep::nothing, workspace_);
  return shared;
}

at::Tensor SavedActivations::stream(std::int64_t l) { return stream_of(decoder_, l, token_ids().numel(), workspace_); }

LayerActivations SavedActivations::layer(std::int64_t l) {
  auto a = buffers(decoder_, l, checkpoint_ ? 0 : l, token_ids().numel(), Keep::for_backward, workspace_);
  a.h_in = stream(l);
  return a;
}

KeptSink::KeptSink(const Decoder& decoder, KeptActivations& kept, std::span<const KeptActivations::Node> nodes,
                   Workspace& workspace)
    : decoder_(decoder), kept_(kept), nodes_(nodes), workspace_(workspace), shared_(decoder.config().layers.size()) {
  const auto T = static_cast<std::int64_t>(nodes.size());
  streams_[0] = workspace.take(Slot::h, {T, decoder.config().hidden_size}, decoder.accumulate_dtype());
  streams_[1] = workspace.take(Slot::h_next, {T, decoder.config().hidden_size}, decoder.accumulate_dtype());
}

LayerActivations KeptSink::layer(std::int64_t l) {
  auto& shared = shared_[first_alike(decoder_, l)];
  if (!shared.qkv.defined())
    shared = buffers(decoder_, l, 0, static_cast<std::int64_t>(nodes_.size()), Keep::for_backward, workspace_);
  return shared;
}

KeptSource::KeptSource(const Decoder& decoder, const KeptActivations& kept, std::vector<KeptActivations::Node> nodes,
                       const at::Tensor& token_ids, const at::Tensor& positions, Workspace& workspace)
    : ActivationSource(token_ids, positions),
      decoder_(decoder),
      kept_(kept),
      nodes_(std::move(nodes)),
      workspace_(workspace) {}

at::Tensor KeptSource::stream_behind() const {
  LayerActivations behind;
  const auto layers = decoder_.config().num_layers();
  behind.h_in = stream_of(decoder_, layers, token_ids().numel(), workspace_);
  kept_.get(layers, behind, nodes_);
  return behind.h_in;
}

LayerActivations KeptSource::layer(std::int64_t l) {
  const auto T = token_ids().numel();
  auto a = buffers(decoder_, l, 0, T, Keep::for_backward, workspace_);
  a.h_in = stream_of(decoder_, 0, T, workspace_);
  kept_.get(l, a, nodes_);
  return a;
}

KeptActivations kept_activations_of(const Decoder& decoder) {
  Workspace workspace;
  std::vector<std::int64_t> bytes;
  const auto stream = stream_of(decoder, 0, 1, workspace);
  for (std::int64_t l = 0; l < decoder.config().num_layers(); ++l) {
    auto a = buffers(decoder, l, 0, 1, Keep::for_backward, workspace);
    a.h_in = stream;
    bytes.push_back(0);
    for (const auto& t : a.all()) bytes.back() += t.defined() ? static_cast<std::int64_t>(t.nbytes()) : 0;
  }
  bytes.push_back(static_cast<std::int64_t>(stream.nbytes()));
  return KeptActivations(bytes);
}

}  // namespace nemo_rl::model
