// The configuration of a decoder, from its Hugging Face config.json. Python reads and checks the file
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
#include "ops/experts.h"

namespace nemo_rl::model {

/// The names in the checkpoint of a layer's norms, by place; empty: no norm. Attention and the MLP are one branch each.
/// The input of a branch may be normalised, and so may its output, which is added to the residual stream. The default
/// is Llama's.
struct LayerNorms {
  std::string before_attention = "input_layernorm";
  std::string after_attention;
  std::string before_mlp = "post_attention_layernorm";
  std::string after_mlp;
  std::string after_per_layer;  ///< of the branch of per-layer inputs
};

enum class QkNorm {
  none,
  head,   ///< each query and key head separately, with one weight [H] for all heads: Qwen3
  whole,  ///< all query heads together, weight [N·H], and all key heads, weight [K·H]: OLMo 2
};

/// The properties in which the layers of a decoder may differ.
struct LayerConfig {
  std::int64_t window = 0;    ///< maximum number of tokens that attention reads, including the current one; 0: all
  int rope = 0;               ///< index in ModelConfig::ropes of the RoPE table for queries and keys; kNoRope: none
  bool has_experts = false;   ///< its MLP is ModelConfig::experts
  bool is_recurrent = false;  ///< its mixer is recurrent (ModelConfig::recurrent) instead of attention
  bool has_mixer = true, has_mlp = true;                               ///< a layer of Nemotron-H has one of the two
  std::int64_t head_dim = 0, num_kv_heads = 0, intermediate_size = 0;  ///< its own H, K and I; 0: the model's
  bool values_are_keys = false;  ///< attention's values are its keys before their norm
  int keys_of = kOwn;            ///< the earlier layer whose keys and values attention reads; kOwn: it has its own
  bool has_attention() const { return has_mixer && !is_recurrent; }
  bool has_own_keys() const { return has_attention() && keys_of == kOwn; }
  static constexpr int kNoRope = -1, kOwn = -1;
};

/// One RoPE table: it rotates the first 2 · inv_freq.size() dimensions of a head.
struct RopeConfig {
  std::vector<double> inv_freq;   ///< after rope scaling
  double attention_factor = 1.0;  ///< multiplies cos and sin (yarn, longrope)
};

/// A mixture of experts: a router sends each token through `chosen` of `count` MLPs. The result is their weighted sum.
/// The weights are the softmax of the router's logits, over all experts or with `renormalise` over the chosen ones, or
/// those of a sigmoid router, whose bias is a buffer.
struct ExpertsConfig {
  std::int64_t count = 0;              ///< E
  std::int64_t chosen = 0;             ///< k: experts per token; among equal logits the lower index is chosen
  std::int64_t intermediate_size = 0;  ///< of each expert
  bool renormalise = false;
  std::optional<ops::SigmoidRouter> sigmoid;
  std::int64_t latent_size = 0;  ///< of what the experts read and write, a projection of the stream; 0: the stream
  std::int64_t shared_size = 0;  ///< of the shared expert, an MLP for all tokens; 0: none
  bool shared_gate = true;       ///< a sigmoid gate multiplies the shared expert's output
  bool has_biases = false;       ///< the router and each expert's matrices have biases: gpt-oss
  bool beside_mlp = false;       ///< the shared expert is the layer's MLP (experts_beside_mlp.h): Gemma 4
  /// Names in the checkpoint of the expert block (empty: the layer itself), its router, an expert's matrices, and the
  /// shared expert.
  std::string block = "mlp", router = "gate", gate = "gate_proj", up = "up_proj", down = "down_proj",
              shared = "shared_expert";
};

/// Multi-head latent attention (DeepSeek-AI, 2024). The head size H is that of queries and keys, whose last `rope_dim`
/// dimensions are rotated. The keys of all heads share these dimensions.
struct LatentConfig {
  std::int64_t query_rank = 0;  ///< columns of the queries' latent; 0: queries have none
  std::int64_t rank = 0;        ///< columns of the latent of keys and values
  std::int64_t rope_dim = 0;    ///< R
  std::int64_t value_dim = 0;   ///< V', the size of a value head, at most H
};

/// The tensor-parallel slice of the layers and of the vocabulary that a process holds.
struct TensorSlice {
  int rank = 0, size = 1;
};

/// Entries [begin, end) of the vocabulary.
struct VocabRows {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};

/// The numbers of heads and I are those of this process's slice; V and D are those of the whole model.
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
  kernels::RecurrentShape recurrent;   ///< of recurrent layers
  std::optional<LatentConfig> latent;  ///< attention is latent: DeepSeek-V3
  double rms_norm_eps = 1e-6;
  double norm_offset = 0;           ///< norms multiply by norm_offset + weight: 1 in Gemma
  double attention_scale = 0;       ///< multiplies the attention scores
  double embedding_multiplier = 1;  ///< multiplies the embedding (Granite, Gemma)
  double residual_multiplier = 1;   ///< multiplies the outputs of attention and MLP (Granite)
  double logit_multiplier = 1;      ///< multiplies the logits (Granite)
  double attention_softcap = 0;     ///< c: attention scores become c * tanh(score / c); 0: off (Gemma 2)
  double logit_softcap = 0;         ///< the same for the logits
  bool tie_word_embeddings = false;
  bool qkv_bias = false;     ///< Qwen2; Llama with attention_bias
  bool output_bias = false;  ///< o_proj has a bias: Llama with attention_bias
  bool output_gate = false;  ///< each query head has a gate, whose sigmoid multiplies the head's result: Qwen3.5
  bool mlp_bias = false;
  bool attention_sinks = false;   ///< each head has a learned attention sink, a term of its softmax: gpt-oss
  bool fused_qkv = false;         ///< the checkpoint has q, k and v in one tensor: Phi 3
  bool fused_gate_up = false;     ///< the checkpoint has gate and up in one tensor: Phi 3, GLM-4
  bool rope_interleaved = false;  ///< RoPE pairs adjacent dimensions (kernels/rope.h): DeepSeek-V3, GLM-4, ERNIE 4.5
  QkNorm qk_norm = QkNorm::none;
  LayerNorms norms;
  kernels::Gate activation = kernels::Gate::silu;  ///< of the MLP's gate, or of an MLP without gate
  bool value_norm = false;                         ///< values are normalised by head, without a weight: Gemma 4
  bool layer_scalars = false;                      ///< a number, a buffer, multiplies each layer's result: Gemma 4
  std::int64_t per_layer_input = 0;                ///< P, columns of a per-layer input (per_layer_input.h); 0: none
  bool value_head = false;                         ///< a critic: a scalar head in place of the LM head

  /// The format of the attention and MLP matrices of all layers, including experts; quantised matrices are frozen.
  /// None: the matrices have the compute type.
  std::optional<kernels::BlockFormat> quantization;
  /// The format of the embedding and the LM head then: 8 bits, as in llama.cpp's files. With nf4 none, as in
  /// bitsandbytes' folders.
  std::optional<kernels::BlockFormat> vocabulary_quantization() const {
    return quantization && *quantization != kernels::BlockFormat::nf4 ? std::optional(kernels::BlockFormat::q8_0)
                                                                      : std::nullopt;
  }

  TensorSlice slice;

  /// Returns one process's slice of this whole model: an equal share of the heads, key/value heads and MLP columns, and
  /// whole blocks of the vocabulary. Throws ArgumentError if the model cannot be split like this.
  ModelConfig sliced(TensorSlice part) const;
  /// Returns this with the sizes of layer `l` as those of all layers.
  ModelConfig of_layer(std::int64_t l) const;
  /// The number of vocabulary entries that the log-softmax sums as one block; slices begin at multiples of it.
  std::int64_t vocab_block() const;
  /// The vocabulary entries of process `rank` of slice.size.
  VocabRows vocab_rows(int rank) const;
  VocabRows vocab_rows() const { return vocab_rows(slice.rank); }

  /// Rows of the first matrix of an MLP with `width` intermediate columns: gates and ups, or only ups.
  std::int64_t up_rows(std::int64_t width) const { return kernels::has_gate(activation) ? 2 * width : width; }
  /// Whether gate and up are one fused matrix product with the activation, which reads weights in pairs of rows.
  bool has_gated_product() const { return activation == kernels::Gate::silu || activation == kernels::Gate::gelu_tanh; }
  bool has_experts() const;
  bool has_recurrent() const;
  std::int64_t num_layers() const { return static_cast<std::int64_t>(layers.size()); }
  std::int64_t query_size() const { return num_heads * head_dim; }
  std::int64_t qkv_size() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
};

/// Low-rank adapters (LoRA, Hu et al., 2021): the matrices of `targets` become W + s · B · A. W [out, in] is frozen; A
/// [dim, in] and B [out, dim] are trained.
struct LoraConfig {
  std::int64_t dim = 8;
  double alpha = 32;
  std::vector<std::string> targets;  ///< names in the checkpoint of the adapted matrices, without duplicates
  bool merge = true;  ///< merge the adapters into the weights; otherwise matrix products add their results
  bool use_rslora = false;
  /// s: alpha / dim, or alpha / sqrt(dim) (rsLoRA, Kalajdzievski, 2023).
  double scale() const {
    const auto rank = static_cast<double>(dim);
    return alpha / (use_rslora ? std::sqrt(rank) : rank);
  }
};

}  // namespace nemo_rl::model
