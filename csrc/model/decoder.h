// The decoder of Llama, Qwen2 and Qwen3 on packed tokens: T tokens of many sequences, no padding. One forward serves
// training, scoring and generation; only where keys and values come from differs (the Attention callback).
//
// Letters: T packed tokens, D hidden, I intermediate, N heads, K key/value heads, H head size. Types: S is the compute
// type (float32, bfloat16, float64), A its accumulation type (float32, float32, float64). The residual stream is A.
#pragma once
#include <functional>
#include <span>

#include "model/kept_activations.h"
#include "model/parameters.h"
#include "model/workspace.h"
#include "ops/attention.h"

namespace nemo_rl::model {

/// attention(layer, qkv, out, lse): out [T, N·H]; lse is undefined where nothing is kept.
using Attention = std::function<void(std::int64_t layer, const at::Tensor& qkv, at::Tensor& out, at::Tensor& lse)>;
/// attention_backward(qkv, out, d_out, lse, d_qkv)
using AttentionBackward = std::function<void(const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& d_out, const at::Tensor& lse,
                                             at::Tensor& d_qkv)>;

/// cos and sin of every position [P, H/2] float32, grown as positions come.
class RopeTable {
 public:
  RopeTable(const ModelConfig& config, at::Device device);
  void reserve(std::int64_t positions);
  const at::Tensor& cos() const { return cos_; }
  const at::Tensor& sin() const { return sin_; }

 private:
  std::vector<double> inv_freq_;
  double attention_factor_;
  at::Device device_;
  at::Tensor cos_, sin_;
};

class Decoder {
 public:
  Decoder(ModelConfig config, DecoderParameters parameters);

  const ModelConfig& config() const { return config_; }
  const DecoderParameters& parameters() const { return parameters_; }
  ops::AttentionHeads attention_heads() const;
  at::Device device() const { return parameters_.flat.device(); }
  at::ScalarType compute_dtype() const { return parameters_.flat.scalar_type(); }
  at::ScalarType accumulate_dtype() const { return compute_dtype() == at::kDouble ? at::kDouble : at::kFloat; }

  /// For positions up to `count` that a forward will get on the device.
  void reserve_positions(std::int64_t count) { rope_.reserve(count); }
  /// Where the angles of positions lie; it changes as more are reserved.
  const void* rope_place() const { return rope_.cos().defined() ? rope_.cos().const_data_ptr() : nullptr; }

  /// Residual stream [R, D] after the last layer of the R rows that are wanted, nothing kept. token_ids and positions are int64 [T]
  /// on the CPU, wherever the parameters are; or on their device, where ids are checked and positions are reserved already. The other
  /// rows stop once the last layer has their keys and values.
  at::Tensor forward(const at::Tensor& token_ids, const at::Tensor& positions, const Attention& attention,
                     std::span<const std::int64_t> rows, Workspace& workspace);

  /// The same, keeping what backward needs (only each layer's input when `checkpoint`: the rest is computed again).
  at::Tensor forward_train(const at::Tensor& token_ids, const at::Tensor& positions, const Attention& attention, bool checkpoint,
                           Workspace& workspace);

  /// forward, which also puts every token's activations into `kept`: row t is that of nodes[t]. `attention` gives lse too.
  at::Tensor forward_keeping(const at::Tensor& token_ids, const at::Tensor& positions, const Attention& attention,
                             std::span<const std::int64_t> rows, KeptActivations& kept, std::span<const KeptActivations::Node> nodes,
                             Workspace& workspace);
  /// forward_train's result from there, without computing. `kept` must hold these rows until backward, which takes a layer's at a time.
  /// A row without a node is 0, and so must be all gradients that reach it: nothing is trained on it, and no later row reads it.
  at::Tensor forward_from(const KeptActivations& kept, std::vector<KeptActivations::Node> nodes, const at::Tensor& token_ids,
                          const at::Tensor& positions, Workspace& workspace);
  /// What `kept` is to be made for.
  KeptActivations kept_activations() const;

  /// Adds the gradients of all parameters but the head's and the final norm's to `grads`; dh [T, D] is the gradient of
  /// forward_train's result and is overwritten. Valid once after forward_train or forward_from.
  void backward(const at::Tensor& dh, const Attention& attention, const AttentionBackward& attention_backward,
                const DecoderParameters& grads, Workspace& workspace);

  /// y [R, D] S = final norm of h [R, D]; rstd [R, 1] may be undefined.
  void final_norm(const at::Tensor& h, const at::Tensor& y, const at::Tensor& rstd) const;

 private:
  /// What a layer's forward writes and nobody reads later; all layers share it.
  struct Scratch {
    at::Tensor normed;  ///< [T, D] S
    at::Tensor act;     ///< [T, I] S
  };
  Scratch scratch(std::int64_t T, Workspace& workspace) const;
  void run_layer(std::int64_t layer, const at::Tensor& positions, const Attention& attention, LayerActivations& a, const at::Tensor& h_out,
                 const Scratch& scratch, bool keep);
  LayerActivations for_backward(std::int64_t layer, const at::Tensor& dh, const Attention& attention, Workspace& workspace);
  void run_attention(std::int64_t layer, const at::Tensor& positions, const Attention& attention, LayerActivations& a, const Scratch& scratch);
  void run_mlp(std::int64_t layer, LayerActivations& a, const at::Tensor& h_mid, const at::Tensor& h_out, const Scratch& scratch);
  LayerActivations buffers(std::int64_t layer, std::int64_t T, bool keep, Workspace& workspace) const;
  at::Tensor places_of(const at::Tensor& positions);
  at::Tensor in_compute_dtype(const at::Tensor& dh, Workspace& workspace) const;
  void backward_mlp(std::int64_t layer, const LayerActivations& a, const at::Tensor& dh, const LayerParameters& grads, Workspace& workspace);
  void backward_attention(std::int64_t layer, const LayerActivations& a, const at::Tensor& dh, const AttentionBackward& attention_backward,
                          const LayerParameters& grads, Workspace& workspace);

  ModelConfig config_;
  DecoderParameters parameters_;
  RopeTable rope_;
  // of the last forward_train or forward_from
  at::Tensor token_ids_, positions_;
  std::vector<LayerActivations> saved_;
  bool checkpoint_ = false;
  const KeptActivations* kept_ = nullptr;  // where the activations come from, if not from saved_
  std::vector<KeptActivations::Node> nodes_;
};

}  // namespace nemo_rl::model
