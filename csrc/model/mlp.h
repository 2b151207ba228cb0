// The MLP of a layer. It reads the normalised residual stream and gives what the layer adds to it; norms, sums over
// slices and the addition are the decoder's. A kind of MLP is one class: its tensors, its forward and its backward.
//
// Letters and types as in decoder.h.
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "model/gradient_views.h"
#include "model/layer_activations.h"
#include "model/parameters.h"
#include "model/workspace.h"
#include "ops/packed_weights.h"

namespace nemo_rl::model {

/// Buffers of a forward.
struct MlpScratch {
  at::Tensor act;      ///< [T, I] S; undefined: no layer has a dense MLP
  at::Tensor gate_up;  ///< [T, 2I] S, where the gated product does not end in the activation
  Workspace* workspace = nullptr;
  const ops::PackedWeights* packed = nullptr;  ///< copies of weights, for few rows
};

inline std::optional<at::Tensor> if_defined(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

class Mlp {
 public:
  virtual ~Mlp() = default;
  /// Its tensors, in the order in which they lie in memory.
  virtual std::vector<LayerTensor> tensors() const = 0;
  /// What a backward reads of a token, in S.
  struct Kept {
    std::int64_t gate_up = 0;         ///< columns of LayerActivations::gate_up
    std::int64_t shared_gate_up = 0;  ///< of LayerActivations::shared_gate_up
  };
  virtual Kept kept() const = 0;
  virtual void pack(const LayerParameters& p, ops::PackedWeights& packed) const = 0;
  /// Asks for the weights that `forward` reads first.
  virtual void ask_ahead(const LayerParameters& p, const ops::PackedWeights* packed) const = 0;
  /// y [T, D] A = mlp(x), or y += mlp(x) with `accumulate`; x [T, D] S. Fills a.gate_up and a.shared_gate_up where they
  /// are defined. Each row of y depends on its row of x alone, bit for bit.
  virtual void forward(const LayerParameters& p, const at::Tensor& x, const at::Tensor& y, bool accumulate,
                       const LayerActivations& a, const MlpScratch& s) const = 0;
  /// d_x [T, D] A = the gradient of x, from that of y, dy [T, D] S; adds the gradients of the tensors to `grads`. x()
  /// is what the forward read.
  virtual void backward(const LayerParameters& p, const std::function<at::Tensor()>& x, const at::Tensor& dy,
                        const LayerActivations& a, const at::Tensor& d_x, const LayerGradients& grads,
                        Workspace& workspace) const = 0;
};

/// act = f(gate) · up of x, f by ModelConfig::activation; w and bias hold gates, then ups. gate_up may be undefined
/// where has_gated_product().
void gated_product(const ModelConfig& config, const at::Tensor& x, const at::Tensor& w, const at::Tensor& bias,
                   const at::Tensor& gate_up, const at::Tensor& act, const ops::PackedWeights* packed);

/// That of layer `l`.
std::unique_ptr<Mlp> mlp_of(const ModelConfig& config, std::int64_t l);

}  // namespace nemo_rl::model
