// What a decoder is, as its Hugging Face config.json says. Reading and checking the file is Python's part
// (nemo_rl_cpp/models/hf_config.py).
#pragma once
#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/recurrence.h"
#include "kernels/swiglu.h"
#include "kernels/weight_blocks.h"

namespace nemo_rl::model {

/// Where a layer normalises, by the norm's name in the checkpoint; empty: nothing is normalised there. Attention and
/// the MLP are a branch each: what goes into it may be normalised, and what it adds to the residual stream. The default
/// is Llama's.
struct LayerNorms {
  std::string before_attention = "input_layernorm";
  std::string after_attention;
  std::string before_mlp = "post_attention_layernorm";
  std::string after_mlp;
};

enum class QkNorm {
  none,
  head,   ///< each query and key head by itself, one weight [H] for all of them: Qwen3
  whole,  ///< all query heads together, weight [N·H], and all key heads, weight [K·H]: OLMo 2
};

/// What one layer of a decoder does otherwise than another.
struct LayerConfig {
  std::int64_t window = 0;    ///< tokens that attention sees at most, its own included; 0: all
  int rope = 0;               ///< which of ModelConfig::ropes turns queries and keys; kNoRope: none
  bool has_experts = false;   ///< its MLP is ModelConfig::experts
  bool is_recurrent = false;  ///< its mixer is a gated delta net (ModelConfig::gated_delta) instead of attention
  static constexpr int kNoRope = -1;
};

/// One table of rotary embeddings: the first 2 · inv_freq.size() dimensions of a head are turned.
struct RopeConfig {
  std::vector<double> inv_freq;   ///< after rope scaling
  double attention_factor = 1.0;  ///< multiplies cos and sin (yarn, longrope)
};

/// A mixture of experts: a router sends each token through `chosen` of `count` MLPs. Their results are added up, each
/// times its weight: softmax of the router's logits, over all experts or with `renormalise` over the chosen ones.
struct ExpertsConfig {
  std::int64_t count = 0;              ///< E
  std::int64_t chosen = 0;             ///< of each token; of equal logits the expert with the lower number
  std::int64_t intermediate_size = 0;  ///< of each expert
  bool renormalise = false;
  std::int64_t shared_size = 0;  ///< of an MLP that all tokens go through, times sigmoid of a gate; 0: there is none
  bool has_biases = false;       ///< of the router, and of each expert's matrices: gpt-oss
  /// Names in the checkpoint: of the block, and in it of the router and of the matrices of an expert.
  std::string block = "mlp", router = "gate", gate = "gate_proj", up = "up_proj", down = "down_proj";
};

/// Which slice of the layers and of the vocabulary a process has, where several hold one model.
struct TensorSlice {
  int rank = 0, size = 1;
};

/// Entries [begin, end) of the vocabulary.
struct VocabRows {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

/// Numbers of heads and I are those of this process's slice; V and D are the model's.
struct ModelConfig {
  std::int64_t vocab_size = 0;         ///< V
  std::int64_t hidden_size = 0;        ///< D
  std::int64_t intermediate_size = 0;  ///< I, of layers without experts
  std::int64_t num_heads = 0;          ///< N
  std::int64_t num_kv_heads = 0;       ///< K
  std::int64_t head_dim = 0;           ///< H
  std::vector<LayerConfig> layers;
  std::vector<RopeConfig> ropes;
  ExpertsConfig experts;
  kernels::GatedDeltaShape gated_delta;  ///< of recurrent layers
  double rms_norm_eps = 1e-6;
  double norm_offset = 0;           ///< norms multiply by offset + w: 1 in Gemma
  double attention_scale = 0;       ///< of the scores
  double embedding_multiplier = 1;  ///< Granite's: of the embedding,
  double residual_multiplier = 1;   ///< of what attention and the MLP add to the residual stream,
  double logit_multiplier = 1;      ///< and of the logits
  double attention_softcap = 0;     ///< c * tanh(score / c) of attention's scores, 0: none (Gemma 2),
  double logit_softcap = 0;         ///< and of the logits
  bool tie_word_embeddings = false;
  bool qkv_bias = false;     ///< Qwen2; Llama with attention_bias
  bool output_bias = false;  ///< bias of o_proj: Llama with attention_bias
  bool output_gate = false;  ///< each query head comes with a gate, whose sigmoid multiplies its result: Qwen3.5
  bool mlp_bias = false;
  bool attention_sinks = false;  ///< each head has a learned term of its softmax: gpt-oss
  bool fused_tensors = false;    ///< the checkpoint has q, k, v and gate, up as one tensor each: Phi 3
  QkNorm qk_norm = QkNorm::none;
  LayerNorms norms;
  kernels::Gate activation = kernels::Gate::silu;  ///< of the MLP's gate
  bool value_head = false;                         ///< a critic: one scalar a token instead of a language-model head

  /// Of the matrices of attention and of the MLP in every layer, experts too, which are then frozen; none: they are of
  /// the compute type.
  std::optional<kernels::BlockFormat> quantization;

  TensorSlice slice;

  /// One process's slice of this whole model: equal numbers of heads, key/value heads and MLP columns, and whole blocks
  /// of the vocabulary. Throws ArgumentError where it cannot be cut so.
  ModelConfig sliced(TensorSlice part) const;
  /// Entries of the vocabulary that the log-softmax sums together; a slice begins at a multiple of it.
  std::int64_t vocab_block() const;
  /// The vocabulary of the process `rank` of slice.size.
  VocabRows vocab_rows(int rank) const;
  VocabRows vocab_rows() const { return vocab_rows(slice.rank); }

  /// Whether gate and up are one product that reads its weights in pairs of rows (silu), or an ordinary product.
  bool has_gated_product() const { return activation == kernels::Gate::silu; }
  bool has_experts() const;
  bool has_recurrent() const;
  bool has_dense_mlp() const;
  std::int64_t num_layers() const { return static_cast<std::int64_t>(layers.size()); }
  std::int64_t query_size() const { return num_heads * head_dim; }
  std::int64_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

/// Low-rank adapters (LoRA, Hu et al., 2021): the matrices of `targets` are W + s · B · A with a frozen W [out, in],
/// and A [dim, in] and B [out, dim] are trained.
struct LoraConfig {
  std::int64_t dim = 8;
  double alpha = 32;
  std::vector<std::string> targets;  ///< matrices of layers by their names in the checkpoint, each once
  bool merge = true;                 ///< into effective weights; false: products add them to those of W
  bool use_rslora = false;
  /// s: alpha / dim, or alpha / sqrt(dim) (rsLoRA, Kalajdzievski, 2023).
  double scale() const {
    const auto rank = static_cast<double>(dim);
    return alpha / (use_rslora ? std::sqrt(rank) : rank);
  }
};

}  // namespace nemo_rl::model
