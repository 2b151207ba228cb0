// The mixer of a layer, which combines a token with earlier tokens. It reads the normalised residual stream and returns
// the input of the layer's output projection (LayerParameters::o_weight). The decoder computes norms, this projection
// and the addition, and the gradients of the products of qkv_weight and o_weight. Each kind of mixer is a class, which
// defines its tensors, its forward and backward pass, and the activations that the backward pass reads.
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
#include "ops/experts.h"
#include "ops/gated_delta.h"

namespace nemo_rl::model {

/// attention(layer, qkv, out, lse): out [T, N·H]; lse is undefined if nothing is kept.
using Attention = std::function<void(std::int64_t layer, const at::Tensor& qkv, at::Tensor& out, at::Tensor& lse)>;
/// attention_backward(layer, qkv, out, d_out, lse, d_qkv)
using AttentionBackward = std::function<void(std::int64_t layer, const at::Tensor& qkv, const at::Tensor& out,
                                             const at::Tensor& d_out, const at::Tensor& lse, at::Tensor& d_qkv)>;

/// The states of a recurrent layer in generation, by slot; undefined in training.
struct RecurrentState {
  at::Tensor inputs;  ///< [slots, W - 1, conv_size] S: the last inputs of the short convolution
  at::Tensor state;   ///< [slots, U, dk·dv] A; empty if a layer has only a convolution
};

/// The context before the tokens of a forward pass, for each kind of layer.
struct History {
  Attention attention;
  AttentionBackward attention_backward;  ///< only in training
  /// Whether attention() may be called with the requested rows alone: their sequences' keys lie in a cache.
  bool attends_rows = false;
  std::vector<ops::RecurrentSequence> sequences;  ///< for recurrent layers; may be empty if there are none
  std::function<RecurrentState(std::int64_t layer)> state;
  ops::ExpertBalance* balance = nullptr;  ///< of the experts, in a backward pass; nullptr: none
};

/// The rows of a pass that a layer computes.
struct MixerRows {
  at::Tensor positions;  ///< [R] of these rows
  at::Tensor index;      ///< [R] of T rows; undefined: all
  std::int64_t T = 0;    ///< with `index`
};

/// What a mixer needs for a forward or backward pass besides its input.
struct MixerStep {
  const MixerRows& rows;
  const RopeTable* rope;  ///< nullptr: queries and keys are not rotated
  const History& history;
  Workspace& workspace;
};

class Mixer {
 public:
  virtual ~Mixer() = default;
  /// The mixer's tensors, in the order of their memory.
  virtual std::vector<LayerTensor> tensors() const = 0;
  /// The number of columns of each tensor of LayerActivations that a forward pass fills; 0: not used.
  struct Kept {
    std::int64_t qkv_raw = 0, qkv = 0, attn = 0;
    std::int64_t q_rstd = 0, k_rstd = 0, lse = 0, v_rstd = 0;  ///< only for a backward pass
  };
  virtual Kept kept() const = 0;
  /// The number of columns of the result.
  virtual std::int64_t columns() const = 0;
  /// Returns the result [T, columns] S for x [T, D] S, which may be a.attn or a buffer of the workspace. Fills `a`.
  virtual at::Tensor forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                             const MixerStep& step) const = 0;
  /// Returns the result of a forward pass again, from the activations that it filled.
  virtual at::Tensor result(const LayerParameters& p, const LayerActivations& a, Workspace& workspace) const = 0;
  /// Returns the gradient [T, rows of qkv_weight] S of qkv_weight · x, from d_result, which is overwritten. Adds the
  /// gradients of the mixer's tensors to `grads`, except those of qkv_weight, o_weight and their biases.
  virtual at::Tensor backward(const LayerWeights& w, const at::Tensor& d_result, const LayerActivations& a,
                              const LayerGradients& grads, const MixerStep& step) const = 0;
};

/// Returns the mixer of layer `l`; nullptr: it has none.
std::unique_ptr<Mixer> mixer_of(const ModelConfig& config, std::int64_t l);

}  // namespace nemo_rl::model
