// The seam of all products of a layer with a weight matrix: forward, gated product, gradient of the input, and the
// packed copy. Decoder and Mlp name a matrix by its field of LayerParameters and never see how it is stored.
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

/// Rows [begin, begin + count) of a matrix of a layer.
struct MatrixRows {
  MatrixRows(at::Tensor LayerParameters::* field) : field(field) {}  // NOLINT(google-explicit-constructor): all rows
  MatrixRows(at::Tensor LayerParameters::* field, std::int64_t begin, std::int64_t count)
      : field(field), begin(begin), count(count) {}
  at::Tensor LayerParameters::* field;
  std::int64_t begin = 0, count = kAll;
  static constexpr std::int64_t kAll = -1;
};

/// What a product of a layer needs but its tensors.
struct ProductContext {
  Workspace& workspace;
  const ops::PackedWeights* packed = nullptr;  ///< copies that products of few rows read; nullptr: none
  RowAdapters rows = {};                       ///< the adapters of each row, where rows have different ones
};

/// The weights of one layer as its products read them, for one forward or backward. In all of them W [out, in] is the
/// matrix that `m` names; what stands in W's place (quantised blocks) or is added to it (adapters) is looked up here,
/// and nowhere else. Each row of a result depends on its row of x alone, bit for bit.
class LayerWeights {
 public:
  /// `added`: adapters of all rows unless context.rows gives them; nullptr: none. All outlive this.
  LayerWeights(const ModelConfig& config, std::int64_t layer, const LayerParameters& tensors,
               const AddedAdapters* added, const ProductContext& context)
      : config_(config), layer_(layer), tensors_(tensors), added_(added), context_(context) {}

  /// Norms and biases, which no product multiplies.
  const LayerParameters& tensors() const { return tensors_; }

  /// y [T, out] (+)= x · Wᵀ + bias; `bias` may be undefined. x S, y S or A. With adapters of W the sums are
  /// (y +) (x · Wᵀ + bias), then + (x · Aᵀ) · (s B)ᵀ, all in A; where y is S it is rounded once, at the end.
  void forward(MatrixRows m, const at::Tensor& x, const at::Tensor& bias, const at::Tensor& y,
               bool accumulate = false) const;
  /// act [T, I] = f(gate) · up of [gate, up] = x · Wᵀ + bias, f by ModelConfig::activation; W and bias hold gates, then
  /// ups. gate_up [T, 2I] is filled where it is defined.
  void gated_product(MatrixRows m, const at::Tensor& x, const at::Tensor& bias, const at::Tensor& gate_up,
                     const at::Tensor& act) const;
  /// dx [T, in] (+)= dy · W.
  void backward_input(MatrixRows m, const at::Tensor& dy, const at::Tensor& dx, bool accumulate = false) const;

  /// Asks for the weights of the next product; `gated`: of gated_product.
  void ask_ahead(MatrixRows m, bool gated = false) const;
  /// Adds the matrix to a packed copy; `gated`: for gated_product.
  void pack(MatrixRows m, ops::PackedWeights& packed, bool gated = false) const;

 private:
  at::Tensor dense(const MatrixRows& m) const;
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
