// The seam of all products of a layer with a weight matrix: forward, gated product, gradient of the input, and the
// packed copy. Decoder and Mlp name a matrix by its field of LayerParameters and never see how it is stored.
//
// Letters and types as in decoder.h.
#pragma once
#include <optional>

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

/// The weights of one layer as its products read them, for one forward or backward. In all of them W [out, in] is the
/// matrix that `m` names. Each row of a result depends on its row of x alone, bit for bit. To be extended by what
/// stands in W's place (quantised blocks) or is added to it (adapters): here, and nowhere else.
class LayerWeights {
 public:
  /// `packed`: copies that products of few rows read; nullptr: none. `workspace` outlives this.
  LayerWeights(const ModelConfig& config, const LayerParameters& tensors, Workspace& workspace,
               const ops::PackedWeights* packed = nullptr)
      : config_(config), tensors_(tensors), workspace_(workspace), packed_(packed) {}

  /// Norms and biases, which no product multiplies.
  const LayerParameters& tensors() const { return tensors_; }

  /// y [T, out] (+)= x · Wᵀ + bias; `bias` may be undefined. x S, y S or A.
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

  const ModelConfig& config_;
  const LayerParameters& tensors_;
  Workspace& workspace_;
  const ops::PackedWeights* packed_;
};

}  // namespace nemo_rl::model
