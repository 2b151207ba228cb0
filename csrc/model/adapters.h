// Low-rank adapters of a decoder that is otherwise frozen. The decoder reads effective weights W' = W + (alpha / dim) ·
// B · A, rounded to its type, which are formed here whenever A and B have changed. So everything that reads weights
// (training, generation, refit, checkpoints) reads them as it reads any others.
#pragma once
#include "model/gradient_views.h"

namespace nemo_rl::model {

class Adapters {
 public:
  /// `weights`: of the decoder, as loaded: they become W. The adapted matrices are kept once more, in their type. A and
  /// B are zero.
  Adapters(const ModelConfig& config, const LoraConfig& lora, const DecoderParameters& weights);

  const ParameterLayout& layout() const { return layout_; }
  /// A and B, and a value head, in the accumulation type: float32 also where the decoder is bfloat16.
  const at::Tensor& masters() const { return masters_; }
  /// What a backward adds to, for a flat buffer like masters().
  GradientViews gradient_views(const at::Tensor& flat) const { return {config_, layout_, flat, factors_}; }
  /// Of such a buffer what each of several slices of a model has a part of, of one layer: A behind inputs that all
  /// have, B before outputs that they sum.
  std::vector<at::Tensor> partial(std::int64_t layer, const at::Tensor& flat) const;

  /// Makes the decoder's weights of W and masters(). Each is one sum in the accumulation type, rounded once. Where all
  /// of B is 0, the weights are W to the bit.
  void merge();
  /// The decoder's parameters with W in place of the effective weights; they share all memory.
  DecoderParameters base() const;

 private:
  void merge(const at::Tensor& base, const at::Tensor& a, const MatrixAdapters::Part& part, const at::Tensor& weights);
  ModelConfig config_;
  double scale_;
  ParameterLayout layout_;
  DecoderParameters weights_;
  at::Tensor masters_, rounded_, merged_;
  std::vector<LayerAdapters> views_, factors_;
  std::vector<LayerParameters> base_;  ///< adapted matrices alone
};

}  // namespace nemo_rl::model
