// Per-layer inputs (Gemma 4): besides its embedding a token has P numbers for each of the L layers. They come from a
// second embedding table and from a projection of the embedding e [T, D], which is scaled as in the residual stream:
//   input [T, L·P] = (norm(projection · e / sqrt(D)) + sqrt(P) · table[token]) / sqrt(2)
// A third branch of each layer, behind the MLP, adds its part of them to the stream h, gated by the stream:
//   h += norm(per_layer_projection · (f(per_layer_gate · h) · input))     f from ModelConfig::activation
//
// Letters and types as in decoder.h.
#pragma once
#include <vector>

#include "model/gradient_views.h"
#include "model/layer_weights.h"
#include "model/parameters.h"
#include "model/workspace.h"

namespace nemo_rl::model {

class PerLayerInput {
 public:
  explicit PerLayerInput(const ModelConfig& config) : c_(config) {}
  /// The tensors of a layer's branch, in the order of their memory.
  static std::vector<LayerTensor> tensors(const ModelConfig& config);

  /// The inputs of all layers, [T, L·P] S, in Slot::per_layer; e [T, D] A.
  at::Tensor inputs(const DecoderParameters& p, const at::Tensor& token_ids, const at::Tensor& e,
                    Workspace& workspace) const;
  /// d_e [T, D] A += the gradient of e from d_inputs [T, L·P] S. Adds the gradients of table, projection and norm to
  /// `grads`.
  void inputs_backward(const DecoderParameters& p, const at::Tensor& token_ids, const at::Tensor& e,
                       const at::Tensor& d_inputs, const DecoderParameters& grads, const at::Tensor& d_e) const;

  /// y [T, D] A (+)= what the branch of layer `l` returns before its norm, from x [T, D] S, the stream. Fills `kept`
  /// [T, 2P] S if it is defined.
  void forward(const LayerWeights& w, std::int64_t l, const at::Tensor& x, const at::Tensor& inputs,
               const at::Tensor& kept, const at::Tensor& y, bool accumulate, Workspace& workspace) const;
  /// d_x [T, D] A = the gradient of x from dy [T, D] S, and the layer's part of d_inputs if that is defined.
  void backward(const LayerWeights& w, std::int64_t l, const at::Tensor& x, const at::Tensor& dy,
                const at::Tensor& kept, const at::Tensor& d_x, const at::Tensor& d_inputs, const LayerGradients& grads,
                Workspace& workspace) const;

 private:
  at::Tensor projected(const DecoderParameters& p, const at::Tensor& x, at::ScalarType sums) const;
  std::int64_t columns() const { return c_.num_layers() * c_.per_layer_input; }

  ModelConfig c_;
};

}  // namespace nemo_rl::model
