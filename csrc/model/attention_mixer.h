// Attention as the mixer of a layer: norms of queries and keys, RoPE, attention, and in Qwen3-Next and Qwen3.5 a gate
// of the result, which the query projection computes too. In Gemma 4 values are normalised as well, and some layers
// read the keys and values of an earlier one (LayerConfig::keys_of), to which their gradients go.
#pragma once
#include "model/mixer.h"

namespace nemo_rl::model {

class AttentionMixer : public Mixer {
 public:
  AttentionMixer(const ModelConfig& config, std::int64_t layer);
  std::vector<LayerTensor> tensors() const override;
  Kept kept() const override;
  std::int64_t columns() const override { return c_.query_size(); }
  at::Tensor forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                     const MixerStep& step) const override;
  at::Tensor result(const LayerParameters& p, const LayerActivations& a, Workspace& workspace) const override;
  at::Tensor backward(const LayerWeights& w, const at::Tensor& d_result, const LayerActivations& a,
                      const LayerGradients& grads, const MixerStep& step) const override;

 private:
  std::int64_t key_size() const { return c_.num_kv_heads * c_.head_dim; }
  /// Columns of the input projection: those of qkv that the layer computes, and of the gate if there is one.
  std::int64_t raw_size() const { return (c_.output_gate ? 2 : 1) * c_.query_size() + raw_heads_ * key_size(); }
  /// From the rows of an input projection with gates, which begin with [q | gate] of each head: the queries (`which` 0)
  /// or the gates (1), [T, N, H].
  at::Tensor query_part(const at::Tensor& raw, std::int64_t which) const;
  at::Tensor raw_queries(const LayerActivations& a, Workspace& workspace) const;
  void normalise(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y, const at::Tensor& rstd) const;
  void normalise_heads(const LayerParameters& p, LayerActivations& a) const;
  /// Keys and values [T, 2KH] in `slot` of layer `of`.
  at::Tensor keys_values(std::int64_t of, LayerSlot slot, std::int64_t T, at::ScalarType type,
                         Workspace& workspace) const;
  void share_gradients(const at::Tensor& d_qkv, Workspace& workspace) const;
  at::Tensor ones(const at::Tensor& like) const;
  void rotate(const at::Tensor& qkv, const MixerStep& step, bool inverse) const;

  ModelConfig c_;  ///< with the sizes of this layer
  std::int64_t layer_;
  LayerConfig own_;
  std::int64_t raw_heads_;  ///< multiples of key_size() in the projection: keys and values, keys, or none
  std::int64_t last_reader_ = LayerConfig::kOwn;  ///< the last layer that reads the keys that this one reads or has
};

}  // namespace nemo_rl::model
