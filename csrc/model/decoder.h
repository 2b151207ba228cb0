// The decoder on packed tokens: T tokens of many sequences, without padding. Training, scoring and generation use the
// same forward pass. They differ only in the History, which provides earlier keys, values and states, and in the
// ActivationSink, which stores activations. ModelConfig (norms, biases, activation) and LayerParameters describe a
// layer.
//
// Letters: T packed tokens, D hidden, I intermediate, N heads, K key/value heads, H head size. Types: S is the compute
// type (float32, bfloat16, float64), A its accumulation type (float32, float32, float64). The residual stream is A.
#pragma once
#include <functional>
#include <span>

#include "distributed/peers.h"
#include "model/gradient_views.h"
#include "model/layer_activations.h"
#include "model/layer_weights.h"
#include "model/mixer.h"
#include "model/mlp.h"
#include "model/parameters.h"
#include "model/per_layer_input.h"
#include "model/rope_table.h"
#include "model/workspace.h"
#include "ops/attention.h"

namespace nemo_rl::model {

class ActivationSink;
class ActivationSource;

using LayerDone = std::function<void(std::int64_t layer)>;

class Decoder {
 public:
  /// `peers`: the processes that hold the other tensor-parallel slices of the model; nullptr: none. All of them must
  /// make the same calls with the same tokens. The residual stream is bit-identical on all of them.
  Decoder(ModelConfig config, DecoderParameters parameters, distributed::Peers* peers = nullptr);

  const ModelConfig& config() const { return config_; }
  const DecoderParameters& parameters() const { return parameters_; }
  ops::AttentionHeads attention_heads(std::int64_t layer) const;
  /// The mixer and the MLP of layer `l`, which must have one (LayerConfig).
  const Mixer& mixer(std::int64_t l) const { return *mixers_[static_cast<std::size_t>(l)]; }
  const Mlp& mlp(std::int64_t l) const { return *mlps_[static_cast<std::size_t>(l)]; }
  distributed::Peers* peers() const { return peers_; }
  /// The weights of layer `l` for its matrix products.
  LayerWeights weights(std::int64_t l, const ProductContext& context) const {
    return {config_, l, layer(l), added_, context};
  }
  /// Sets the adapters that all matrix products add, unless a call of forward() passes others. They must outlive the
  /// decoder.
  void add_adapters(const AddedAdapters* added) { added_ = added; }
  /// Whether the last layers read keys of an earlier one, so that they compute the requested rows alone.
  bool shares_last_keys() const { return shares_last_keys_; }
  at::Device device() const { return parameters_.flat.device(); }
  at::ScalarType compute_dtype() const { return parameters_.flat.scalar_type(); }
  at::ScalarType accumulate_dtype() const { return compute_dtype() == at::kDouble ? at::kDouble : at::kFloat; }

  /// Extends the RoPE tables to `count` positions, for forward passes whose positions are on the device.
  void reserve_positions(std::int64_t count) {
    for (auto& rope : ropes_) rope.reserve(count);
  }
  /// The address of the first RoPE table. It changes when the table grows.
  const void* rope_place() const {
    return !ropes_.empty() && ropes_.front().cos().defined() ? ropes_.front().cos().const_data_ptr() : nullptr;
  }

  /// Returns the residual stream [R, D] after the last layer, for the R requested `rows`. token_ids and positions are
  /// int64 [T] on the CPU. They may also be on the parameters' device if the ids have been checked and the positions
  /// reserved. If `sink` keeps nothing, the other rows are computed up to the last keys, values or state that their
  /// tokens have (`history.attends_rows`: even if later layers read these keys). `packed`: as in ops::linear_forward.
  /// `adapters`: the adapters of the T rows.
  at::Tensor forward(const at::Tensor& token_ids, const at::Tensor& positions, const History& history,
                     std::span<const std::int64_t> rows, ActivationSink& sink, Workspace& workspace,
                     const ops::PackedWeights* packed = nullptr, RowAdapters adapters = {});

  /// Adds the gradients of the trained parameters, except those of the head and the final norm, to `grads`. dh [T, D]
  /// is the gradient of the forward pass's result and is overwritten. `source`: the activations of that forward pass.
  /// `layer_done`: called with the index of each layer, the last one first, when its gradients are complete; may be
  /// empty.
  void backward(ActivationSource& source, const at::Tensor& dh, const History& history, const GradientViews& grads,
                Workspace& workspace, const LayerDone& layer_done = {});

  /// y [R, D] S = the input of the head: the final norm of h [R, D], times logit_multiplier. rstd [R, 1] may be
  /// undefined.
  void final_norm(const at::Tensor& h, const at::Tensor& y, const at::Tensor& rstd) const;
  /// From dy, which is overwritten: dh = the gradient of h, and d_norm += the gradient of the norm's weight.
  void final_norm_backward(const at::Tensor& dy, const at::Tensor& h, const at::Tensor& rstd, const at::Tensor& dh,
                           const at::Tensor& d_norm) const;

 private:
  /// Buffers that the layers of a forward pass share, because no later layer reads them.
  struct Scratch {
    at::Tensor normed;      ///< [T, D] S: the input of a branch
    at::Tensor branch_out;  ///< [T, D] A: a branch's output, if a norm, a sum over peers or a factor follows
    at::Tensor branch;      ///< [T, D] S: the same, normalised
    at::Tensor per_layer;   ///< [T, L·P] S: the per-layer inputs
    ProductContext context;
  };
  Scratch scratch(std::int64_t T, const ProductContext& context) const;
  bool has_mixer(std::int64_t l) const { return mixers_[static_cast<std::size_t>(l)] != nullptr; }
  bool has_mlp(std::int64_t l) const { return mlps_[static_cast<std::size_t>(l)] != nullptr; }
  const LayerParameters& layer(std::int64_t l) const { return parameters_.layers[static_cast<std::size_t>(l)]; }
  /// Those of T tokens whose rows of the embedding this process holds.
  struct OwnTokens {
    at::Tensor index;  ///< [n] indices of the tokens
    at::Tensor ids;    ///< [n] their rows of the embedding
  };
  OwnTokens own_tokens(const at::Tensor& token_ids) const;
  void embed(const at::Tensor& token_ids, const at::Tensor& h) const;
  void embed_backward(const at::Tensor& dh, const at::Tensor& token_ids, const at::Tensor& d_embedding) const;
  at::Tensor on_device(const at::Tensor& positions);
  const RopeTable* rope(std::int64_t l) const;
  void normalise(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y, const at::Tensor& rstd) const;
  void run_layer(std::int64_t l, const at::Tensor& positions, const History& history, LayerActivations& a,
                 const at::Tensor& h_out, const Scratch& s);
  at::Tensor run_mixer(std::int64_t l, const MixerRows& rows, const History& history, LayerActivations& a,
                       const Scratch& s);
  at::Tensor forward_rows(std::int64_t first, std::span<const std::int64_t> rows, const at::Tensor& positions,
                          const History& history, LayerActivations& a, const Scratch& s);
  void finish_layer(std::int64_t l, const at::Tensor& mixed, LayerActivations& a, const at::Tensor& h_out,
                    const Scratch& s);
  at::Tensor normalised(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& rstd,
                        const at::Tensor& out) const;
  template <class Product>
  void add_branch(const Product& product, const at::Tensor& norm, const Branch& branch, const at::Tensor& h,
                  const Scratch& s) const;

  at::Tensor branch_gradient(const at::Tensor& dh, const Branch& branch, const at::Tensor& norm,
                             const at::Tensor& d_norm, Workspace& workspace) const;
  void add_input_gradient(const at::Tensor& d_normed, const at::Tensor& h, const at::Tensor& norm,
                          const at::Tensor& rstd, const at::Tensor& dh, const at::Tensor& d_norm) const;
  void backward_per_layer(std::int64_t l, const LayerActivations& a, const at::Tensor& dh, const at::Tensor& d_inputs,
                          const LayerGradients& grads, Workspace& workspace);
  void backward_mlp(std::int64_t l, const LayerActivations& a, const at::Tensor& dh, const History& history,
                    const LayerGradients& grads, Workspace& workspace);
  void backward_mixer(std::int64_t l, const LayerActivations& a, const at::Tensor& positions, const at::Tensor& dh,
                      const History& history, const GradientViews& grads, Workspace& workspace);

  ModelConfig config_;
  DecoderParameters parameters_;
  std::vector<RopeTable> ropes_;
  std::vector<std::unique_ptr<Mixer>> mixers_;
  std::vector<std::unique_ptr<Mlp>> mlps_;
  std::unique_ptr<PerLayerInput> per_layer_;
  distributed::Peers* peers_;
  const AddedAdapters* added_ = nullptr;
  std::int64_t last_own_ = 0;      ///< the last layer with keys, values or states of its own
  bool shares_last_keys_ = false;  ///< whether a layer after it has attention
};

}  // namespace nemo_rl::model
