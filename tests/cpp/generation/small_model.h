// Models of a few thousand weights: the shapes of Qwen3 (norms of queries and keys, tied embeddings) or Qwen2 (biases).
#pragma once
#include <ATen/ATen.h>

#include <cmath>
#include <memory>

#include "model/decoder_model.h"
#include "runtime/tensor.h"

namespace nemo_rl {

inline model::ModelConfig small_config(bool qwen3) {
  model::ModelConfig c;
  c.vocab_size = 131, c.hidden_size = 72, c.intermediate_size = 104, c.layers.resize(2), c.num_heads = 6,
  c.num_kv_heads = 2, c.head_dim = 16, c.attention_scale = 0.25;
  c.qk_norm = qwen3 ? model::QkNorm::head : model::QkNorm::none, c.qkv_bias = !qwen3, c.tie_word_embeddings = qwen3;
  c.ropes.emplace_back();
  for (int i = 0; i < 8; ++i) c.ropes[0].inv_freq.push_back(std::pow(10000.0, -2.0 * i / 16));
  return c;
}

inline std::shared_ptr<model::DecoderModel> random_model(bool qwen3, at::ScalarType dtype) {
  auto m = std::make_shared<model::DecoderModel>(small_config(qwen3), dtype, true);
  at::manual_seed(qwen3 ? 1 : 2);
  m->masters().copy_(at::randn({m->layout().total}) * 0.3);
  m->masters_changed();
  return m;
}

}  // namespace nemo_rl
