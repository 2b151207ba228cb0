// Multi-head latent attention (DeepSeek-AI, 2024) as the mixer of a layer. Queries, keys and values are products of
// small latents, which one product of the layer's input gives:
//   [q_a, kv_a, k_rope] = qkv_weight · x,  q = q_b · norm(q_a),  [k_nope, v] = kv_b · norm(kv_a)
// The last R dimensions of a query and all of k_rope are rotated. A head's key is its k_nope and k_rope, which all
// heads share. Attention then runs as in other layers: keys and values are expanded once, and values are padded with
// zeros to the keys' head size.
#pragma once
#include "model/mixer.h"

namespace nemo_rl::model {

class LatentAttention : public Mixer {
 public:
  LatentAttention(const ModelConfig& config, std::int64_t layer);
  std::vector<LayerTensor> tensors() const override;
  Kept kept() const override;
  std::int64_t columns() const override { return c_.num_heads * s_.value_dim; }
  at::Tensor forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                     const MixerStep& step) const override;
  at::Tensor result(const LayerParameters& p, const LayerActivations& a, Workspace& workspace) const override;
  at::Tensor backward(const LayerWeights& w, const at::Tensor& d_result, const LayerActivations& a,
                      const LayerGradients& grads, const MixerStep& step) const override;

 private:
  /// A latent: the columns [begin, begin + rank) of the input projection, its norm, and the matrix that expands it.
  struct Latent {
    at::Tensor LayerParameters::*norm, LayerParameters::*matrix;
    std::int64_t begin, rank;
    at::Tensor LayerActivations::* rstd;
  };
  Latent queries() const;
  Latent keys_values() const;
  /// Columns of the input projection before the latent of keys and values: the queries' latent, or the queries.
  std::int64_t query_columns() const { return s_.query_rank > 0 ? s_.query_rank : c_.query_size(); }
  std::int64_t nope_dim() const { return c_.head_dim - s_.rope_dim; }
  /// Dimensions [begin, begin + count) of each head of part 0, 1 or 2 (queries, keys, values) of qkv: [T, N, count].
  at::Tensor part(const at::Tensor& qkv, std::int64_t which, std::int64_t begin, std::int64_t count) const;
  /// The same of keys (0) or values (1) of a product with kv_b_weight: all their dimensions.
  at::Tensor expanded_part(const at::Tensor& expanded, std::int64_t which) const;
  at::Tensor expanded(std::int64_t T, at::ScalarType S, Workspace& workspace) const;
  at::Tensor normalised(const LayerParameters& p, const Latent& latent, const LayerActivations& a,
                        Workspace& workspace) const;
  void rotate(const at::Tensor& qkv, const MixerStep& step, bool inverse) const;
  void backward_latent(const LayerWeights& w, const Latent& latent, const at::Tensor& dy, const LayerActivations& a,
                       const at::Tensor& d_raw, const LayerGradients& grads, Workspace& workspace) const;

  ModelConfig c_;
  LatentConfig s_;
  std::int64_t layer_;
};

}  // namespace nemo_rl::model
