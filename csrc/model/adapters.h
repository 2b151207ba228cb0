// Low-rank adapters of a decoder that is otherwise frozen, in one of two ways (LoraConfig::merge).
//
// Merged: the decoder reads effective weights W' = W + (alpha / dim) · B · A, rounded to its type, which are formed
// here whenever A and B have changed. Everything that reads weights reads them as it reads any others; the adapted
// matrices are kept twice.
//
// Apart: the decoder adds (x · Aᵀ) · (s B)ᵀ to its products (added_adapters.h). W is kept once, and several models with
// adapters share it.
#pragma once
#include "model/added_adapters.h"
#include "model/gradient_views.h"

namespace nemo_rl::model {

class Adapters {
 public:
  /// `weights`: of the decoder, as loaded: they become W. A and B are zero.
  Adapters(const ModelConfig& config, const LoraConfig& lora, const DecoderParameters& weights);

  const ParameterLayout& layout() const { return layout_; }
  /// A and B, and a value head, in the accumulation type: float32 also where the decoder is bfloat16.
  const at::Tensor& masters() const { return masters_; }
  /// What a backward adds to, for a flat buffer like masters().
  GradientViews gradient_views(const at::Tensor& flat) const { return {config_, layout_, flat, factors_}; }
  /// Of such a buffer what each of several slices of a model has a part of, of one layer: A behind inputs that all
  /// have, B before outputs that they sum.
  std::vector<at::Tensor> partial(std::int64_t layer, const at::Tensor& flat) const;

  /// What products add; nullptr: the adapters are merged.
  const AddedAdapters* added() const { return merges_ ? nullptr : &added_; }
  /// After masters() were written: makes what the decoder reads. Merged weights are one sum in the accumulation type,
  /// rounded once; where all of B is 0, they are W to the bit.
  void masters_changed();
  /// Writes W' into the adapted matrices of `weights`, which are like the decoder's.
  void merge_into(const DecoderParameters& weights);
  /// The decoder's parameters with W in place of the effective weights; they share all memory.
  DecoderParameters base() const;

 private:
  void keep_base();
  void make_added();
  void merge(const at::Tensor& base, const at::Tensor& a, const MatrixAdapters::Part& part, const at::Tensor& weights);
  ModelConfig config_;
  double scale_;
  bool merges_;
  ParameterLayout layout_;
  DecoderParameters weights_;
  at::Tensor masters_;
  at::Tensor rounded_;    ///< scale · masters in the compute type, which gradients' products read
  at::Tensor unscaled_;   ///< apart: masters in the compute type
  at::Tensor forward_b_;  ///< apart: room of AddedToMatrix::Part::b
  at::Tensor merged_;
  std::vector<LayerAdapters> views_, factors_;
  std::vector<LayerParameters> base_;  ///< merged: adapted matrices alone
  AddedAdapters added_;
};

}  // namespace nemo_rl::model
