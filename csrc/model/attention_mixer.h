// Attention as the mixer of a layer: norms of queries and keys, RoPE, attention, and in Qwen3-Next and Qwen3.5 a gate
// of the result, which the query projection computes too.
#pragma once
#include "model/mixer.h"

namespace nemo_rl::model {

class AttentionMixer : public Mixer {
 public:
  AttentionMixer(const ModelConfig& config, std::int64_t layer) : c_(config), layer_(layer) {}
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
  /// Columns of the input projection: those of qkv, and of the gate if there is one.
  std::int64_t raw_size() const { return c_.qkv_size() + (c_.output_gate ? c_.query_size() : 0); }
  /// From the rows of an input projection with gates, which begin with [q | gate] of each head: the queries (`which` 0)
  /// or the gates (1), [T, N, H].
  at::Tensor query_part(const at::Tensor& raw, std::int64_t which) const;
  at::Tensor raw_queries(const LayerActivations& a, Workspace& workspace) const;
  void normalise(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y, const at::Tensor& rstd) const;
  void normalise_heads(const LayerParameters& p, LayerActivations& a) const;
  void rotate(const at::Tensor& qkv, const MixerStep& step, bool inverse) const;

  ModelConfig c_;
  std::int64_t layer_;
};

}  // namespace nemo_rl::model
