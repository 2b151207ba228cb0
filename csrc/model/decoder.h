// The decoder on packed tokens: T tokens of many sequences, without padding. One forward serves training, scoring and
// generation. Only two things differ: the History says where keys, values and states come from, and the
// ActivationSink says what is kept of the layers. ModelConfig (norms, biases, activation) and LayerParameters describe
// a layer.
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
#include "model/rope_table.h"
#include "model/workspace.h"
#include "ops/attention.h"

namespace nemo_rl::model {

class ActivationSink;
class ActivationSource;

using LayerDone = std::function<void(std::int64_t layer)>;

class Decoder {
 public:
  /// `peers`: the processes that hold the other slices of the layers and of the vocabulary; nullptr: none. Every one of
  /// them makes the same calls with the same tokens. The residual stream is the same bits on all of them.
  Decoder(ModelConfig config, DecoderParameters parameters, distributed::Peers* peers = nullptr);

  const ModelConfig& config() const { return config_; }
  const DecoderParameters& parameters() const { return parameters_; }
  ops::AttentionHeads attention_heads(std::int64_t layer) const;
  const Mixer& mixer(std::int64_t l) const { return *mixers_[static_cast<std::size_t>(l)]; }
  const Mlp& mlp(std::int64_t l) const { return *mlps_[static_cast<std::size_t>(l)]; }
  distributed::Peers* peers() const { return peers_; }
  /// The matrices of layer `l`, for its products.
  LayerWeights weights(std::int64_t l, const ProductContext& context) const {
    return {config_, l, layer(l), added_, context};
  }
  /// Adapters that all products add, unless a forward is given others; they outlive the decoder.
  void add_adapters(const AddedAdapters* added) { added_ = added; }
  at::Device device() const { return parameters_.flat.device(); }
  at::ScalarType compute_dtype() const { return parameters_.flat.scalar_type(); }
  at::ScalarType accumulate_dtype() const { return compute_dtype() == at::kDouble ? at::kDouble : at::kFloat; }

  /// Reserves angles for positions up to `count`, which a forward will get on the device.
  void reserve_positions(std::int64_t count) {
    for (auto& rope : ropes_) rope.reserve(count);
  }
  /// Address of the angles of positions. It changes when more are reserved.
  const void* rope_place() const {
    return !ropes_.empty() && ropes_.front().cos().defined() ? ropes_.front().cos().const_data_ptr() : nullptr;
  }

  /// Residual stream [R, D] after the last layer, for the R rows that are wanted. token_ids and positions are int64 [T]
  /// on the CPU, for parameters on any device. They may lie on the parameters' device if the ids are checked and the
  /// positions reserved already. If `sink` keeps nothing, the other rows stop once the last layer has their keys and
  /// values. `packed`: as of ops::linear_forward. `adapters`: of the T rows.
  at::Tensor forward(const at::Tensor& token_ids, const at::Tensor& positions, const History& history,
                     std::span<const std::int64_t> rows, ActivationSink& sink, Workspace& workspace,
                     const ops::PackedWeights* packed = nullptr, RowAdapters adapters = {});

  /// Adds the gradients of what is trained, but the head's and the final norm's, to `grads`; dh [T, D] is the gradient
  /// of the forward's result and is overwritten. `source`: what that forward left. `layer_done`: hears the number of
  /// each layer, the last one first, when its gradients are complete; may be empty.
  void backward(ActivationSource& source, const at::Tensor& dh, const History& history, const GradientViews& grads,
                Workspace& workspace, const LayerDone& layer_done = {});

  /// y [R, D] S = what the head multiplies: the final norm of h [R, D], times logit_multiplier; rstd [R, 1] may be
  /// undefined.
  void final_norm(const at::Tensor& h, const at::Tensor& y, const at::Tensor& rstd) const;
  /// dh = gradient of h and d_norm += that of the norm's weight, from dy, which is overwritten.
  void final_norm_backward(const at::Tensor& dy, const at::Tensor& h, const at::Tensor& rstd, const at::Tensor& dh,
                           const at::Tensor& d_norm) const;

 private:
  /// What all layers of a forward share: buffers that each writes and nobody reads later.
  struct Scratch {
    at::Tensor normed;      ///< [T, D] S: what a branch reads
    at::Tensor branch_out;  ///< [T, D] A, where a norm, a sum over peers or a factor stands behind a branch
    at::Tensor branch;      ///< [T, D] S, the same normalised
    MlpScratch mlp;
    ProductContext context;
  };
  Scratch scratch(std::int64_t T, const ProductContext& context) const;
  const LayerParameters& layer(std::int64_t l) const { return parameters_.layers[static_cast<std::size_t>(l)]; }
  /// Of T tokens those whose rows of the vocabulary are here.
  struct OwnTokens {
    at::Tensor index;  ///< [n] which
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
  at::Tensor run_mixer(std::int64_t l, const at::Tensor& positions, const History& history, LayerActivations& a,
                       const Scratch& s);
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
  void backward_mlp(std::int64_t l, const LayerActivations& a, const at::Tensor& dh, const LayerGradients& grads,
                    Workspace& workspace);
  void backward_mixer(std::int64_t l, const LayerActivations& a, const at::Tensor& positions, const at::Tensor& dh,
                      const History& history, const GradientViews& grads, Workspace& workspace);

  ModelConfig config_;
  DecoderParameters parameters_;
  std::vector<RopeTable> ropes_;
  std::vector<std::unique_ptr<Mixer>> mixers_;
  std::vector<std::unique_ptr<Mlp>> mlps_;
  distributed::Peers* peers_;
  const AddedAdapters* added_ = nullptr;
};

}  // namespace nemo_rl::model
