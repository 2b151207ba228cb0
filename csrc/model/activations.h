// Where a forward leaves what its layers compute, and where a backward finds it: nowhere (scoring and generation), in
// buffers of each layer (training), or in rows that generation keeps for training.
#pragma once
#include <span>
#include <vector>

#include "model/decoder.h"
#include "model/kept_activations.h"

namespace nemo_rl::model {

/// Takes what a forward computes, one layer after the other.
class ActivationSink {
 public:
  virtual ~ActivationSink() = default;
  /// Whether a backward will read all rows of all layers.
  virtual bool keeps() const = 0;
  /// [T, D] A: where the residual stream before layer `l` is written (num_layers: behind the last).
  virtual at::Tensor stream(std::int64_t l) = 0;
  /// The buffers of layer `l`, all but h_in.
  virtual LayerActivations layer(std::int64_t l) = 0;
  /// They are filled. Behind the last layer, `l` = num_layers, there is h_in alone.
  virtual void put(std::int64_t, const LayerActivations&) {}
};

/// Gives a backward what a forward left.
class ActivationSource {
 public:
  ActivationSource(at::Tensor token_ids, at::Tensor positions)
      : token_ids_(std::move(token_ids)), positions_(std::move(positions)) {}
  virtual ~ActivationSource() = default;
  const at::Tensor& token_ids() const { return token_ids_; }
  const at::Tensor& positions() const { return positions_; }
  /// Layer `l` as its forward left it; valid until the next call.
  virtual LayerActivations layer(std::int64_t l) = 0;
  /// Whether only h_in is there: the layer is to be computed again, into the other buffers.
  virtual bool holds_input_alone(std::int64_t) const { return false; }

 private:
  at::Tensor token_ids_, positions_;
};

/// Keeps nothing: layers of one kind share their buffers, and the residual stream is one tensor.
class NothingKept : public ActivationSink {
 public:
  NothingKept(const Decoder& decoder, std::int64_t T, Workspace& workspace);
  bool keeps() const override { return false; }
  at::Tensor stream(std::int64_t) override { return h_; }
  LayerActivations layer(std::int64_t l) override;

 private:
  const Decoder& decoder_;
  Workspace& workspace_;
  at::Tensor h_;
  LayerActivations shared_[4];  ///< of each kind of layer
};

/// Keeps all layers until their backward; of each only its input when `checkpoint`.
class SavedActivations : public ActivationSink, public ActivationSource {
 public:
  SavedActivations(const Decoder& decoder, const at::Tensor& token_ids, const at::Tensor& positions, bool checkpoint,
                   Workspace& workspace)
      : ActivationSource(token_ids, positions), decoder_(decoder), workspace_(workspace), checkpoint_(checkpoint) {}
  bool keeps() const override { return true; }
  at::Tensor stream(std::int64_t l) override;
  LayerActivations layer(std::int64_t l) override;
  /// The last layer's buffers still hold its own.
  bool holds_input_alone(std::int64_t l) const override {
    return checkpoint_ && l + 1 < decoder_.config().num_layers();
  }

 private:
  const Decoder& decoder_;
  Workspace& workspace_;
  bool checkpoint_;
};

/// Of generation: puts every token's activations into `kept`, row t into that of nodes[t].
class KeptSink : public ActivationSink {
 public:
  KeptSink(const Decoder& decoder, KeptActivations& kept, std::span<const KeptActivations::Node> nodes,
           Workspace& workspace);
  bool keeps() const override { return true; }
  at::Tensor stream(std::int64_t l) override { return streams_[static_cast<std::size_t>(l % 2)]; }
  LayerActivations layer(std::int64_t l) override;
  void put(std::int64_t l, const LayerActivations& a) override { kept_.put(l, a, nodes_); }

 private:
  const Decoder& decoder_;
  KeptActivations& kept_;
  std::span<const KeptActivations::Node> nodes_;
  Workspace& workspace_;
  at::Tensor streams_[2];
  LayerActivations shared_[4];  ///< of each kind of layer
};

/// From there, without a forward. `kept` must hold these rows until the backward, which takes a layer's at a time.
class KeptSource : public ActivationSource {
 public:
  KeptSource(const Decoder& decoder, const KeptActivations& kept, std::vector<KeptActivations::Node> nodes,
             const at::Tensor& token_ids, const at::Tensor& positions, Workspace& workspace);
  /// [T, D] A: the residual stream behind the last layer.
  at::Tensor stream_behind() const;
  LayerActivations layer(std::int64_t l) override;

 private:
  const Decoder& decoder_;
  const KeptActivations& kept_;
  std::vector<KeptActivations::Node> nodes_;
  Workspace& workspace_;
};

/// KeptActivations made for this decoder's rows.
KeptActivations kept_activations_of(const Decoder& decoder);

}  // namespace nemo_rl::model
