// Where a backward adds the gradients of what is trained: all parameters, or low-rank adapters of some matrices, whose
// other parameters are frozen.
#pragma once
#include "model/parameters.h"
#include "model/workspace.h"

namespace nemo_rl::model {

/// The adapters of one matrix of a layer, in which several of the checkpoint lie side by side (q, k, v; gate, up): A
/// and B themselves, or their gradients.
struct MatrixAdapters {
  /// Rows [begin, begin + b.size(1)) of the matrix are adapted.
  struct Part {
    std::int64_t begin = 0;
    at::Tensor b;  ///< [dim, rows], transposed
  };
  at::Tensor a;  ///< [parts · dim, in]: one after the other
  std::vector<Part> parts;
};

/// Those of a layer, with the matrix that each is of; matrices without are left out.
struct LayerAdapters {
  struct OfMatrix {
    at::Tensor LayerParameters::* matrix;
    MatrixAdapters adapters;
  };
  std::vector<OfMatrix> all;
  /// nullptr: the matrix has none.
  const MatrixAdapters* find(at::Tensor LayerParameters::* matrix) const;
};

/// A flat buffer in the layout of adapters (ParameterLayout) seen as those of all layers.
std::vector<LayerAdapters> adapter_views(const ModelConfig& config, const ParameterLayout& layout,
                                         const at::Tensor& flat);

/// What the gradient products of one layer are added to.
class LayerGradients {
 public:
  LayerGradients(const LayerParameters& dense, const LayerAdapters* adapters, const LayerAdapters* factors)
      : dense_(dense), adapters_(adapters), factors_(factors) {}
  /// A tensor is undefined where the parameter is frozen, or adapted.
  const LayerParameters& dense() const { return dense_; }
  /// Whether `add` has something to do for this matrix.
  bool wants(at::Tensor LayerParameters::* matrix) const;
  /// From dy [T, out] and x [T, in] of y = x · Wᵀ. The whole matrix: dW += dyᵀ · x. An adapter, with s = alpha / dim:
  /// dB += s · dyᵀ · (x · Aᵀ) and dA += s · (dy · B)ᵀ · x, which never forms dW.
  void add(at::Tensor LayerParameters::* matrix, const at::Tensor& dy, const at::Tensor& x, Workspace& workspace) const;

 private:
  const LayerParameters& dense_;
  const LayerAdapters *adapters_, *factors_;
};

class GradientViews {
 public:
  /// Of all parameters: `flat` is a buffer in the model's layout.
  GradientViews(const ModelConfig& config, const ParameterLayout& layout, at::Tensor flat);
  /// Of adapters: `flat` is one in theirs. `factors`: A and B times alpha / dim, in the compute type, which products
  /// read.
  GradientViews(const ModelConfig& config, const ParameterLayout& adapters, const at::Tensor& flat,
                const std::vector<LayerAdapters>& factors);

  /// Those that are added to as they are; undefined where parameters are frozen.
  const DecoderParameters& dense() const { return dense_; }
  LayerGradients layer(std::int64_t l) const;
  /// The first layer with something to train; those before it need no backward.
  std::int64_t first_layer() const { return first_layer_; }
  /// Whether something before layer `l` is trained.
  bool goes_below(std::int64_t l) const { return l > first_layer_ || dense_.embedding.defined(); }

 private:
  DecoderParameters dense_;
  std::vector<LayerAdapters> adapters_;
  const std::vector<LayerAdapters>* factors_ = nullptr;
  std::int64_t first_layer_ = 0;
};

}  // namespace nemo_rl::model
