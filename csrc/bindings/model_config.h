// The keyword dictionary of nemo_rl_cpp.models.hf_config.native_config as a ModelConfig.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <type_traits>

#include "model/config.h"

namespace nemo_rl::bindings {

inline model::ModelConfig config_from(const pybind11::dict& d) {
  model::ModelConfig c;
  auto get = [&](const char* key, auto& value) { value = d[key].cast<std::decay_t<decltype(value)>>(); };
  get("vocab_size", c.vocab_size), get("hidden_size", c.hidden_size), get("intermediate_size", c.intermediate_size);
  get("num_layers", c.num_layers), get("num_heads", c.num_heads), get("num_kv_heads", c.num_kv_heads), get("head_dim", c.head_dim);
  get("rms_norm_eps", c.rms_norm_eps), get("tie_word_embeddings", c.tie_word_embeddings);
  get("qkv_bias", c.qkv_bias), get("output_bias", c.output_bias), get("mlp_bias", c.mlp_bias), get("qk_norm", c.qk_norm);
  get("value_head", c.value_head), get("rope_inv_freq", c.rope_inv_freq), get("rope_attention_factor", c.rope_attention_factor);
  return c;
}

}  // namespace nemo_rl::bindings
