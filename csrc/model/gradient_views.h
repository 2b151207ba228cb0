// Where a backward pass adds the gradients of the trained parameters: all parameters, or only low-rank adapters of some
// matrices.
#pragma once
#include "model/parameters.h"
#include "model/workspace.h"

namespace nemo_rl::model {

/// The adapters of one matrix of a layer or of an expert, which may join several matrices of the checkpoint (q, k, v;
/// gate, up): A and B, or their gradients.
struct MatrixAdapters {
  /// Rows [begin, begin + b.size(1)) of the matrix are adapted.
  struct Part {
    std::int64_t begin = 0;
    at::Tensor b;  ///< [dim, rows], transposed
  };
  at::Tensor a;  ///< [parts · dim, in]: one after the other
  std::vector<Part> parts;
};

/// The adapters of a layer; matrices without adapters are omitted.
using LayerAdapters = ByMatrix<MatrixAdapters>;

/// Returns the adapters of all layers as views of `flat`, a buffer in the layout of the adapters.
std::vector<LayerAdapters> adapter_views(const ModelConfig& config, const ParameterLayout& layout,
                                         const at::Tensor& flat);

/// The gradients of one layer, to which a backward pass adds.
class LayerGradients {
 public:
  LayerGradients(const LayerParameters& dense, const LayerAdapters* adapters, const LayerAdapters* factors)
      : dense_(dense), adapters_(adapters), factors_(factors) {}
  /// The gradients of whole parameters; undefined for frozen and for adapted parameters.
  const LayerParameters& dense() const { return dense_; }
  /// Whether `add` has an effect for this matrix.
  bool wants(const MatrixRows& matrix) const;
  /// Adds the gradients from dy [T, out] and x [T, in] of y = x · Wᵀ. For a whole matrix: dW += dyᵀ · x. For an
  /// adapter, with s = alpha / dim: dB += s · dyᵀ · (x · Aᵀ) and dA += s · (dy · B)ᵀ · x; dW is never formed.
  void add(const MatrixRows& matrix, const at::Tensor& dy, const at::Tensor& x, Workspace& workspace) const;

 private:
  const LayerParameters& dense_;
  const LayerAdapters *adapters_, *factors_;
};

class GradientViews {
 public:
  /// The gradients of all parameters: `flat` is a buffer in the model's layout. `without_routers`: the weights of
  /// routers are frozen.
  GradientViews(const ModelConfig& config, const ParameterLayout& layout, at::Tensor flat,
                bool without_routers = false);
  /// The gradients of adapters: `flat` is a buffer in the layout `adapters`. `factors`: A and B times alpha / dim, in
  /// the compute type, which matrix products read.
  GradientViews(const ModelConfig& config, const ParameterLayout& adapters, const at::Tensor& flat,
                const std::vector<LayerAdapters>& factors);

  /// The gradients of whole parameters; undefined for frozen parameters.
  const DecoderParameters& dense() const { return dense_; }
  LayerGradients layer(std::int64_t l) const;
  /// The first layer with trained parameters; the layers before it need no backward pass.
  std::int64_t first_layer() const { return first_layer_; }
  /// Whether any parameter before layer `l` is trained.
  bool goes_below(std::int64_t l) const { return l > first_layer_ || dense_.embedding.defined(); }

 private:
  DecoderParameters dense_;
  std::vector<LayerAdapters> adapters_;
  const std::vector<LayerAdapters>* factors_ = nullptr;
  std::int64_t first_layer_ = 0;
};

}  // namespace nemo_rl::model
