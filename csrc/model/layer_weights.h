// The interface for all matrix products of a layer with its weights: forward product, gated product, gradient of the
// input, and the packed copy. Decoder and Mlp name a matrix by its field of LayerParameters; how it is stored is hidden
// here.
//
// Letters and types as in decoder.h.
#pragma once
#include <optional>

#include "model/added_adapters.h"
#include "model/config.h"
#include "model/parameters.h"
#include "model/workspace.h"
#include "ops/packed_weights.h"

namespace nemo_rl::model {

inline std::optional<at::Tensor> if_defined(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

/// What a matrix product of a layer needs besides its tensors.
struct ProductContext {
  Workspace& workspace;
  const ops::PackedWeights* packed = nullptr;  ///< packed copies for products with few rows; nullptr: none
  RowAdapters rows = {};                       ///< the adapters of each row, if rows have different ones
};

/// The weights of one layer for its matrix products in one forward or backward pass. In every product W [out, in] is
/// the matrix that `m` names. Only this class knows whether W is quantised, and which adapters are added to it. Each
/// row of a result depends only on its row of x, bit for bit.
class LayerWeights {
 public:
  /// `added`: adapters for all rows unless context.rows has adapters; nullptr: none. All arguments must outlive this
  /// object.
  LayerWeights(const ModelConfig& config, std::int64_t layer, const LayerParameters& tensors,
               const AddedAdapters* added, const ProductContext& context)
      : config_(config), layer_(layer), tensors_(tensors), added_(added), context_(context) {}

  /// The layer's tensors, for norms and biases.
  const LayerParameters& tensors() const { return tensors_; }

  /// y [T, out] (+)= x · Wᵀ + bias; `bias` may be undefined. x S, y S or A. If W has adapters, y is (y +) (x · Wᵀ +
  /// bias), then + (x · Aᵀ) · (s B)ᵀ, all summed in A; if y is S, it is rounded once, at the end.
  void forward(MatrixRows m, const at::Tensor& x, const at::Tensor& bias, const at::Tensor& y,
               bool accumulate = false) const;
  /// act [T, I] = f(gate) · up with [gate, up] = x · Wᵀ + bias and f from ModelConfig::activation. W and bias hold
  /// gates, then ups. gate_up [T, 2I] is filled if it is defined.
  void gated_product(MatrixRows m, const at::Tensor& x, const at::Tensor& bias, const at::Tensor& gate_up,
                     const at::Tensor& act) const;
  /// dx [T, in] (+)= dy · W.
  void backward_input(MatrixRows m, const at::Tensor& dy, const at::Tensor& dx, bool accumulate = false) const;

  /// The adapters of rows `token` [R] int64 of the batch; empty: they all have the model's.
  std::vector<AdapterRows> adapters_of(const at::Tensor& token) const;
  /// Returns the same weights for the products of other rows, which have these adapters.
  LayerWeights with(RowAdapters rows) const {
    return {config_, layer_, tensors_, added_, {context_.workspace, context_.packed, rows}};
  }

  /// Prefetches the weights of the next matrix product; `gated`: of a gated_product.
  void ask_ahead(MatrixRows m, bool gated = false) const;
  /// Adds the matrix to a packed copy; `gated`: for a gated_product.
  void pack(MatrixRows m, ops::PackedWeights& packed, bool gated = false) const;

 private:
  at::Tensor dense(const MatrixRows& m) const { return m.of(tensors_); }
  at::Tensor rest(const MatrixRows& m) const;
  void product(const MatrixRows& m, const at::Tensor& x, const at::Tensor& bias, const at::Tensor& y,
               bool accumulate) const;
  bool is_adapted(const MatrixRows& m) const;
  void add_adapters(const MatrixRows& m, const at::Tensor& x, std::int64_t first, const at::Tensor& y) const;
  void add(const AddedToMatrix& added, const at::Tensor& x, const at::Tensor& y) const;

  const ModelConfig& config_;
  std::int64_t layer_;
  const LayerParameters& tensors_;
  const AddedAdapters* added_;
  ProductContext context_;
};

}  // namespace nemo_rl::model
