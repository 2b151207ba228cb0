// A recurrent layer's mixer: a short convolution over queries, keys and values, a recurrence, and a gated norm. It is a
// gated delta net (Yang et al., 2024), which Qwen3-Next and Qwen3.5 use in three of four layers, or Mamba-2 (Dao and
// Gu, 2024), which Nemotron-H uses (RecurrentShape::rule).
#pragma once
#include "model/mixer.h"

namespace nemo_rl::model {

class RecurrentMixer : public Mixer {
 public:
  RecurrentMixer(const ModelConfig& config, std::int64_t layer);
  std::vector<LayerTensor> tensors() const override;
  Kept kept() const override;
  std::int64_t columns() const override { return shape_.value_size(); }
  at::Tensor forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                     const MixerStep& step) const override;
  at::Tensor result(const LayerParameters& p, const LayerActivations& a, Workspace& workspace) const override;
  at::Tensor backward(const LayerWeights& w, const at::Tensor& d_result, const LayerActivations& a,
                      const LayerGradients& grads, const MixerStep& step) const override;

 private:
  /// Parts of a row of the input projection, or of its gradient.
  at::Tensor conv_part(const at::Tensor& row) const {
    return row.narrow(1, shape_.is_mamba2() ? shape_.value_size() : 0, shape_.conv_size());
  }
  at::Tensor gate_part(const at::Tensor& row) const {
    return row.narrow(1, shape_.is_mamba2() ? 0 : shape_.conv_size(), shape_.value_size());
  }
  ops::RecurrenceInputs inputs(const LayerParameters& p, const at::Tensor& qkv, const at::Tensor& row) const;
  /// Norms of the result: 0: one of each value head.
  std::int64_t norm_groups() const { return shape_.is_mamba2() ? shape_.key_heads : 0; }

  std::int64_t hidden_, layer_;
  double eps_;
  ops::RecurrentShape shape_;
};

}  // namespace nemo_rl::model
