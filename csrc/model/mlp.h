// The MLP of a layer. It reads the normalised residual stream and returns what the layer adds to the stream. The
// decoder computes norms, sums over slices and the addition. Each kind of MLP is a class, which defines its tensors and
// its forward and backward pass.
//
// Letters and types as in decoder.h.
#pragma once
#include <functional>
#include <memory>

#include "model/gradient_views.h"
#include "model/layer_activations.h"
#include "model/layer_weights.h"
#include "ops/experts.h"

namespace nemo_rl::model {

class Mlp {
 public:
  virtual ~Mlp() = default;
  /// The MLP's tensors, in the order of their memory.
  virtual std::vector<LayerTensor> tensors() const = 0;
  /// The activations of a token that a backward pass reads, in S.
  struct Kept {
    std::int64_t gate_up = 0;         ///< columns of LayerActivations::gate_up
    std::int64_t shared_gate_up = 0;  ///< of LayerActivations::shared_gate_up
    std::int64_t latent = 0;          ///< of LayerActivations::latent
    bool has_branches = false;        ///< LayerActivations::shared_branch and experts_branch
  };
  virtual Kept kept() const = 0;
  /// Whether x is the residual stream [T, D] A itself, which the MLP normalises, instead of its norm.
  virtual bool reads_stream() const { return false; }
  virtual void pack(const LayerWeights& w, ops::PackedWeights& packed) const = 0;
  /// Prefetches the weights that `forward` reads first.
  virtual void ask_ahead(const LayerWeights& w) const = 0;
  /// y [T, D] A = mlp(x), or y += mlp(x) with `accumulate`; x [T, D] S. Fills a.gate_up, a.shared_gate_up and
  /// a.latent if they are defined. Each row of y depends only on its row of x, bit for bit.
  virtual void forward(const LayerWeights& w, const at::Tensor& x, const at::Tensor& y, bool accumulate,
                       const LayerActivations& a, Workspace& workspace) const = 0;
  /// d_x [T, D] A = the gradient of x, from dy [T, D] S. Adds the gradients of the tensors to `grads`. x() returns the
  /// input of the forward pass. `balance`: a loss of the experts that is added to the gradient; nullptr: none.
  virtual void backward(const LayerWeights& w, const std::function<at::Tensor()>& x, const at::Tensor& dy,
                        const LayerActivations& a, const at::Tensor& d_x, const LayerGradients& grads,
                        Workspace& workspace, ops::ExpertBalance* balance) const = 0;
};

/// Returns the MLP of layer `l`; nullptr: it has none.
std::unique_ptr<Mlp> mlp_of(const ModelConfig& config, std::int64_t l);

}  // namespace nemo_rl::model
