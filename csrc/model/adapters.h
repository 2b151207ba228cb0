// Low-rank adapters of an otherwise frozen decoder, merged or apart (LoraConfig::merge).
//
// Merged: the decoder reads effective weights W' = W + (alpha / dim) · B · A, rounded to its type. They are computed
// here whenever A and B have changed. All readers of weights use them like any other weights. The adapted matrices are
// stored twice, as W and as W'.
//
// Apart: the decoder adds (x · Aᵀ) · (s B)ᵀ to its matrix products (added_adapters.h). W is stored once, and several
// models with adapters can share it.
#pragma once
#include "model/added_adapters.h"
#include "model/gradient_views.h"

namespace nemo_rl::model {

class Adapters {
 public:
  /// `weights`: the decoder's loaded weights, which become W. A and B are zero.
  Adapters(const ModelConfig& config, const LoraConfig& lora, const DecoderParameters& weights);

  const ParameterLayout& layout() const { return layout_; }
  /// A and B, and the value head if there is one, in the accumulation type: float32 even if the decoder is bfloat16.
  const at::Tensor& masters() const { return masters_; }
  /// The gradients that a backward pass adds to, as views of `flat`, a buffer like masters(). Adapters that are only
  /// read have no copies in the compute type; the first call makes them.
  GradientViews gradient_views(const at::Tensor& flat);
  /// The parts of such a buffer for one layer that every tensor-parallel slice holds whole, and whose gradients must be
  /// summed over the slices: A if all slices have the same input, B if the outputs are summed over them.
  std::vector<at::Tensor> partial(std::int64_t layer, const at::Tensor& flat) const;

  /// The adapters that matrix products add; nullptr: the adapters are merged.
  const AddedAdapters* added() const { return merges_ ? nullptr : &added_; }
  /// Updates the weights that the decoder reads. Must be called after masters() were written. A merged weight is a sum
  /// in the accumulation type, rounded once; if all of B is 0, it is bit-identical to W.
  void masters_changed();
  /// Writes W' into the adapted matrices of `weights`, which have the decoder's layout.
  void merge_into(const DecoderParameters& weights);
  /// The decoder's parameters with W in place of the effective weights; they share all memory.
  DecoderParameters base() const;

 private:
  void keep_base();
  void make_added();
  void round();
  void merge(const at::Tensor& base, const at::Tensor& a, const MatrixAdapters::Part& part, const at::Tensor& weights);
  ModelConfig config_;
  double scale_;
  bool merges_;
  ParameterLayout layout_;
  DecoderParameters weights_;
  at::Tensor masters_;
  at::Tensor rounded_;  ///< scale · masters in the compute type, for the matrix products of gradients
  bool is_rounded_ = false;
  at::Tensor merged_;
  std::vector<LayerAdapters> views_, factors_;
  std::vector<LayerParameters> base_;  ///< merged: only the adapted matrices
  /// Apart: the B of a matrix, or of the matrices of all experts.
  struct B {
    at::Tensor masters;  ///< [rows, dim] or [experts, rows, dim] A: transposed views of masters_
    at::Tensor scaled;   ///< [1 or experts, rows, dim] A: s B, which added_ reads
  };
  std::vector<B> b_;
  AddedAdapters added_;
};

}  // namespace nemo_rl::model
