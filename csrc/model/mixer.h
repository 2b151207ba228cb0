// The mixer of a layer: what a token takes from earlier tokens. It reads the normalised residual stream and gives the
// input of the layer's output product (LayerParameters::o_weight); norms, that product and the addition are the
// decoder's. A kind of mixer is one class: its tensors, its forward, its backward, and what the backward reads.
//
// Letters and types as in decoder.h.
#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "model/gradient_views.h"
#include "model/layer_activations.h"
#include "model/layer_weights.h"
#include "model/rope_table.h"
#include "ops/attention.h"
#include "ops/gated_delta.h"

namespace nemo_rl::model {

/// attention(layer, qkv, out, lse): out [T, N·H]; lse is undefined where nothing is kept.
using Attention = std::function<void(std::int64_t layer, const at::Tensor& qkv, at::Tensor& out, at::Tensor& lse)>;
/// attention_backward(layer, qkv, out, d_out, lse, d_qkv)
using AttentionBackward = std::function<void(std::int64_t layer, const at::Tensor& qkv, const at::Tensor& out,
                                             const at::Tensor& d_out, const at::Tensor& lse, at::Tensor& d_qkv)>;

/// The states of a recurrent layer in generation, by slots; undefined in training.
struct RecurrentState {
  at::Tensor inputs;  ///< [slots, W - 1, conv_size] S: the last inputs of the short convolution
  at::Tensor state;   ///< [slots, U, dk·dv] A
};

/// What lies before the tokens of a forward, by the kind of layer that reads it.
struct History {
  Attention attention;
  AttentionBackward attention_backward;           ///< only in training
  std::vector<ops::RecurrentSequence> sequences;  ///< of recurrent layers; may be empty where there are none
  std::function<RecurrentState(std::int64_t layer)> state;
};

/// What a mixer needs of a forward or a backward besides its input.
struct MixerStep {
  const at::Tensor& positions;
  const RopeTable* rope;  ///< nullptr: queries and keys are not rotated
  const History& history;
  Workspace& workspace;
};

class Mixer {
 public:
  virtual ~Mixer() = default;
  /// Its tensors, in the order in which they lie in memory.
  virtual std::vector<LayerTensor> tensors() const = 0;
  /// Columns of what a forward fills: those of LayerActivations by name. 0: not used.
  struct Kept {
    std::int64_t qkv_raw = 0, qkv = 0, attn = 0;
    std::int64_t q_rstd = 0, k_rstd = 0, lse = 0;  ///< only for a backward
  };
  virtual Kept kept() const = 0;
  /// Columns of the result.
  virtual std::int64_t columns() const = 0;
  /// The result [T, columns] S for x [T, D] S; fills `a`. It may be a.attn, or lie in the workspace.
  virtual at::Tensor forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                             const MixerStep& step) const = 0;
  /// The result of a forward from what it filled.
  virtual at::Tensor result(const LayerParameters& p, const LayerActivations& a, Workspace& workspace) const = 0;
  /// The gradient [T, rows of qkv_weight] S of the product qkv_weight · x, from that of the result, which is
  /// overwritten; adds the gradients of its other tensors, but the products', to `g`.
  virtual at::Tensor backward(const LayerParameters& p, const at::Tensor& d_result, const LayerActivations& a,
                              const LayerParameters& g, const MixerStep& step) const = 0;
};

/// That of layer `l`.
std::unique_ptr<Mixer> mixer_of(const ModelConfig& config, std::int64_t l);

}  // namespace nemo_rl::model
