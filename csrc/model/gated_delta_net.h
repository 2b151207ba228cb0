// A gated delta net (Yang et al., 2024): a short convolution over queries, keys and values, the gated delta rule, and a
// gated norm. Qwen3-Next and Qwen3.5 use it in three of four layers.
#pragma once
#include "model/mixer.h"

namespace nemo_rl::model {

class GatedDeltaNet : public Mixer {
 public:
  GatedDeltaNet(const ModelConfig& config, std::int64_t layer);
  std::vector<LayerTensor> tensors() const override;
  Kept kept() const override;
  std::int64_t columns() const override { return shape_.value_size(); }
  at::Tensor forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                     const MixerStep& step) const override;
  at::Tensor result(const LayerParameters& p, const LayerActivations& a, Workspace& workspace) const override;
  at::Tensor backward(const LayerParameters& p, const at::Tensor& d_result, const LayerActivations& a,
                      const LayerParameters& g, const MixerStep& step) const override;

 private:
  /// Parts of a row of the input projection, or of its gradient.
  at::Tensor conv_part(const at::Tensor& row) const { return row.narrow(1, 0, shape_.conv_size()); }
  at::Tensor gate_part(const at::Tensor& row) const { return row.narrow(1, shape_.conv_size(), shape_.value_size()); }
  ops::GatedDeltaInputs inputs(const LayerParameters& p, const at::Tensor& qkv, const at::Tensor& row) const;

  std::int64_t hidden_, layer_;
  double eps_;
  ops::GatedDeltaShape shape_;
};

}  // namespace nemo_rl::model
