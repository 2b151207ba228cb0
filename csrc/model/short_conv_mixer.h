// The mixer of LFM2's layers without attention (Liquid AI, 2025): a short convolution between two gates. The input
// projection gives B, C and x, each [T, D] S. The result is C · convolution(B · x); both products are rounded to S.
#pragma once
#include "model/mixer.h"

namespace nemo_rl::model {

class ShortConvMixer : public Mixer {
 public:
  ShortConvMixer(const ModelConfig& config, std::int64_t layer);
  std::vector<LayerTensor> tensors() const override;
  /// The projection, and the convolution's result.
  Kept kept() const override { return {3 * hidden_, hidden_, 0, 0, 0, 0}; }
  std::int64_t columns() const override { return hidden_; }
  at::Tensor forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                     const MixerStep& step) const override;
  at::Tensor result(const LayerParameters& p, const LayerActivations& a, Workspace& workspace) const override;
  at::Tensor backward(const LayerWeights& w, const at::Tensor& d_result, const LayerActivations& a,
                      const LayerGradients& grads, const MixerStep& step) const override;

 private:
  /// B (0), C (1) or x (2) of rows of the input projection, or of its gradient.
  at::Tensor part(const at::Tensor& row, std::int64_t i) const { return row.narrow(1, i * hidden_, hidden_); }
  at::Tensor conv_input(const LayerActivations& a, Workspace& workspace) const;

  std::int64_t hidden_, layer_, width_;
};

}  // namespace nemo_rl::model
