// The keyword dictionary of nemo_rl_cpp.models.hf_config.native_config as a ModelConfig.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "model/config.h"
#include "ops/weight_blocks.h"

namespace nemo_rl::bindings {

inline kernels::Gate gate_from(const std::string& name) {
  if (name == "silu") return kernels::Gate::silu;
  if (name == "gelu_tanh") return kernels::Gate::gelu_tanh;
  if (name == "clamped") return kernels::Gate::clamped;
  if (name == "relu_squared") return kernels::Gate::relu_squared;
  throw pybind11::value_error("activation is '" + name + "', expected silu, gelu_tanh, clamped or relu_squared");
}

inline model::QkNorm qk_norm_from(const std::string& name) {
  if (name == "none") return model::QkNorm::none;
  if (name == "head") return model::QkNorm::head;
  if (name == "whole") return model::QkNorm::whole;
  throw pybind11::value_error("qk_norm is '" + name + "', expected none, head or whole");
}

/// {place: name of the norm there}; a place that is not named has none.
inline model::LayerNorms norms_from(const pybind11::dict& d) {
  const auto name = [&](const char* place) { return d.contains(place) ? d[place].cast<std::string>() : std::string(); };
  return {name("before_attention"), name("after_attention"), name("before_mlp"), name("after_mlp"),
          name("after_per_layer")};
}

/// Sizes and names of a mixture of experts, and the layers that are one.
inline void set_experts(model::ModelConfig& c, const pybind11::dict& d) {
  auto get = [&](const char* key, auto& value) { value = d[key].cast<std::decay_t<decltype(value)>>(); };
  auto& e = c.experts;
  get("count", e.count), get("chosen", e.chosen), get("intermediate_size", e.intermediate_size);
  get("renormalise", e.renormalise), get("shared_size", e.shared_size), get("latent_size", e.latent_size);
  get("has_biases", e.has_biases), get("shared_gate", e.shared_gate), get("shared", e.shared);
  if (d.contains("sigmoid")) {
    const auto s = d["sigmoid"].cast<pybind11::dict>();
    e.sigmoid = ops::SigmoidRouter{s["groups"].cast<std::int64_t>(), s["chosen_groups"].cast<std::int64_t>(),
                                   e.renormalise, s["scale"].cast<double>(), s["epsilon"].cast<double>()};
  }
  get("block", e.block), get("router", e.router), get("gate", e.gate), get("up", e.up), get("down", e.down);
  if (d.contains("beside_mlp")) get("beside_mlp", e.beside_mlp);
  for (const auto l : d["layers"].cast<std::vector<std::size_t>>()) c.layers.at(l).has_experts = true;
}

/// Sizes of the recurrent layers, and which layers they are.
inline void set_recurrent(model::ModelConfig& c, const pybind11::dict& d) {
  auto get = [&](const char* key, auto& value) { value = d[key].cast<std::decay_t<decltype(value)>>(); };
  auto& s = c.recurrent;
  get("key_heads", s.key_heads), get("value_heads", s.value_heads), get("key_dim", s.key_dim);
  get("value_dim", s.value_dim), get("conv_width", s.conv_width);
  if (d.contains("step_limits")) {
    s.rule = kernels::Recurrence::mamba2;
    std::tie(s.least_step, s.greatest_step) = d["step_limits"].cast<std::pair<double, double>>();
  }
  if (d.contains("gated_conv")) s.rule = kernels::Recurrence::none;
  for (const auto l : d["layers"].cast<std::vector<std::size_t>>()) c.layers.at(l).is_recurrent = true;
}

inline model::LatentConfig latent_from(const pybind11::dict& d) {
  model::LatentConfig c;
  auto get = [&](const char* key, auto& value) { value = d[key].cast<std::decay_t<decltype(value)>>(); };
  get("query_rank", c.query_rank), get("rank", c.rank), get("rope_dim", c.rope_dim);
  get("value_dim", c.value_dim);
  return c;
}

/// The layers' own sizes, and whose keys they read: (H, K, I, values are keys, layer of the keys or -1) of each.
inline void set_layer_sizes(model::ModelConfig& c,
                            const std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, int>>& sizes) {
  for (std::size_t l = 0; l < sizes.size(); ++l) {
    auto& layer = c.layers.at(l);
    std::tie(layer.head_dim, layer.num_kv_heads, layer.intermediate_size, layer.values_are_keys, layer.keys_of) =
        sizes[l];
  }
}

/// For each layer, whether its only block is a mixer or (false) an MLP.
inline void set_blocks(model::ModelConfig& c, const std::vector<bool>& is_mixer) {
  for (std::size_t l = 0; l < is_mixer.size(); ++l)
    c.layers.at(l).has_mixer = is_mixer[l], c.layers[l].has_mlp = !is_mixer[l];
}

inline model::ModelConfig config_from(const pybind11::dict& d) {
  model::ModelConfig c;
  auto get = [&](const char* key, auto& value) { value = d[key].cast<std::decay_t<decltype(value)>>(); };
  get("vocab_size", c.vocab_size), get("hidden_size", c.hidden_size), get("intermediate_size", c.intermediate_size);
  get("num_heads", c.num_heads), get("num_kv_heads", c.num_kv_heads), get("head_dim", c.head_dim);
  get("rms_norm_eps", c.rms_norm_eps), get("tie_word_embeddings", c.tie_word_embeddings);
  get("qkv_bias", c.qkv_bias), get("output_bias", c.output_bias), get("mlp_bias", c.mlp_bias);
  get("attention_sinks", c.attention_sinks);
  c.qk_norm = qk_norm_from(d["qk_norm"].cast<std::string>());
  c.norms = norms_from(d["norms"].cast<pybind11::dict>());
  c.activation = gate_from(d["activation"].cast<std::string>());
  get("value_head", c.value_head);
  get("fused_qkv", c.fused_qkv), get("fused_gate_up", c.fused_gate_up), get("norm_offset", c.norm_offset);
  get("rope_interleaved", c.rope_interleaved);
  get("attention_scale", c.attention_scale), get("embedding_multiplier", c.embedding_multiplier),
      get("residual_multiplier", c.residual_multiplier), get("logit_multiplier", c.logit_multiplier);
  get("attention_softcap", c.attention_softcap), get("logit_softcap", c.logit_softcap);
  for (const auto& [inv_freq, factor] : d["ropes"].cast<std::vector<std::pair<std::vector<double>, double>>>())
    c.ropes.push_back({inv_freq, factor});
  for (const auto& [window, rope] : d["layers"].cast<std::vector<std::pair<std::int64_t, std::optional<int>>>>())
    c.layers.push_back({window, rope.value_or(model::LayerConfig::kNoRope)});
  if (d.contains("quantization")) c.quantization = ops::block_format(d["quantization"].cast<std::string>());
  if (d.contains("output_gate")) get("output_gate", c.output_gate);
  if (d.contains("recurrent")) set_recurrent(c, d["recurrent"].cast<pybind11::dict>());
  if (d.contains("latent")) c.latent = latent_from(d["latent"].cast<pybind11::dict>());
  if (d.contains("layer_sizes")) {
    set_layer_sizes(
        c, d["layer_sizes"].cast<std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t, bool, int>>>());
    c.value_norm = c.layer_scalars = true;
    get("per_layer_input", c.per_layer_input);
  }
  if (d.contains("one_block")) set_blocks(c, d["one_block"].cast<std::vector<bool>>());
  if (d.contains("experts")) set_experts(c, d["experts"].cast<pybind11::dict>());
  return c;
}

}  // namespace nemo_rl::bindings
