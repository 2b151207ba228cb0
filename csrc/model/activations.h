// Where a forward pass stores the activations of its layers, and where a backward pass finds them: nowhere (scoring and
// generation), in buffers of each layer (training), or in rows that generation keeps for training.
#pragma once
#include <span>
#include <vector>

#include "model/decoder.h"
#include "model/kept_activations.h"

namespace nemo_rl::model {

/// Receives the activations of a forward pass, layer by layer.
class ActivationSink {
 public:
  virtual ~ActivationSink() = default;
  /// Whether a backward pass will read all rows of all layers.
  virtual bool keeps() const = 0;
  /// [T, D] A: the buffer for the residual stream before layer `l` (num_layers: after the last layer).
  virtual at::Tensor stream(std::int64_t l) = 0;
  /// The buffers of layer `l`, except h_in.
  virtual LayerActivations layer(std::int64_t l) = 0;
  /// Called when the buffers of layer `l` are filled. After the last layer, `l` = num_layers, there is only h_in.
  virtual void put(std::int64_t, const LayerActivations&) {}
};

/// Gives a backward pass the activations of its forward pass.
class ActivationSource {
 public:
  ActivationSource(at::Tensor token_ids, at::Tensor positions)
      : token_ids_(std::move(token_ids)), positions_(std::move(positions)) {}
  virtual ~ActivationSource() = default;
  const at::Tensor& token_ids() const { return token_ids_; }
  const at::Tensor& positions() const { return positions_; }
  /// The activations of layer `l`; valid until the next call.
  virtual LayerActivations layer(std::int64_t l) = 0;
  /// Whether only h_in is stored, so that the layer must be recomputed into the other buffers.
  virtual bool holds_input_alone(std::int64_t) const { return false; }

 private:
  at::Tensor token_ids_, positions_;
};

/// Keeps nothing: layers of the same kind share buffers, and the residual stream is a single tensor.
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
  std::vector<LayerActivations> shared_;  ///< at the first layer of each shape
};

/// Keeps the activations of all layers until their backward pass; with `checkpoint` only the input of each layer.
class SavedActivations : public ActivationSink, public ActivationSource {
 public:
  SavedActivations(const Decoder& decoder, const at::Tensor& token_ids, const at::Tensor& positions, bool checkpoint,
                   Workspace& workspace)
      : ActivationSource(token_ids, positions), decoder_(decoder), workspace_(workspace), checkpoint_(checkpoint) {}
  bool keeps() const override { return true; }
  at::Tensor stream(std::int64_t l) override;
  LayerActivations layer(std::int64_t l) override;
  /// False for the last layer, whose activations are still in the buffers.
  bool holds_input_alone(std::int64_t l) const override {
    return checkpoint_ && l + 1 < decoder_.config().num_layers();
  }

 private:
  const Decoder& decoder_;
  Workspace& workspace_;
  bool checkpoint_;
};

/// A sink for generation. It copies the activations of row t into the row of `kept` for nodes[t].
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
  std::vector<LayerActivations> shared_;  ///< at the first layer of each shape
};

/// A source of activations that a KeptSink has stored, without a forward pass. `kept` must hold these rows until the
/// backward pass, which reads one layer at a time.
class KeptSource : public ActivationSource {
 public:
  KeptSource(const Decoder& decoder, const KeptActivations& kept, std::vector<KeptActivations::Node> nodes,
             const at::Tensor& token_ids, const at::Tensor& positions, Workspace& workspace);
  /// [T, D] A: the residual stream after the last layer.
  at::Tensor stream_behind() const;
  LayerActivations layer(std::int64_t l) override;

 private:
  const Decoder& decoder_;
  const KeptActivations& kept_;
  std::vector<KeptActivations::Node> nodes_;
  Workspace& workspace_;
};

/// Returns an empty KeptActivations for rows of this decoder.
KeptActivations kept_activations_of(const Decoder& decoder);

}  // namespace nemo_rl::model
