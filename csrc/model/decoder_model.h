// The weights of a model and the decoder that reads them. Trainer and engine hold the same DecoderModel, so weights are
// stored once, and both see an update at once.
#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "model/activations.h"
#include "model/adapters.h"
#include "model/lm_head.h"
#include "model/value_head.h"
#include "ops/packed_weights.h"

namespace nemo_rl::model {

class DecoderModel {
 public:
  /// `dtype`: float32, bfloat16 or float64. A trained bfloat16 model has float32 master weights and a rounded copy,
  /// with which it computes; a frozen one has only the copy. A quantised model is frozen, in float32 or
  /// bfloat16. Weights, workspace and results are on `device`: the CPU or a CUDA device (float32 and bfloat16).
  /// `peers`: the processes that hold slices of this model, each with a part of the heads, the MLP and the vocabulary
  /// (tensor parallelism, on the CPU); nullptr: this process holds the whole model. `config` describes the whole model.
  DecoderModel(ModelConfig config, at::ScalarType dtype, bool trainable, at::Device device = at::kCPU,
               std::shared_ptr<distributed::Communicator> peers = nullptr);

  /// Adds low-rank adapters to a frozen model with loaded weights, and trains them in place of the weights. They are
  /// zero: the caller must initialise A in masters() and call masters_changed().
  void adapt(const LoraConfig& lora);
  /// Returns the model without its adapters: a frozen model on the same memory, with a separate workspace. Several
  /// models with unmerged adapters can share one base: each is base() of a frozen model, to which adapt() was applied.
  std::shared_ptr<DecoderModel> base() const;
  /// Freezes the weight matrices of the routers of a model whose weights are trained. To be called before a backward
  /// pass.
  void freeze_routers();
  /// The parts [begin, end) of a range of the memory of masters() that are trained, in order.
  std::vector<std::pair<std::int64_t, std::int64_t>> trained_parts(std::int64_t begin, std::int64_t end) const;
  /// The weights with merged adapters, [layout().total]: compute(), or a copy if adapters are apart.
  at::Tensor merged() const;
  /// The adapters that matrix products add; nullptr: there are none, or they are merged.
  const AddedAdapters* adds_adapters() const { return adapters_ ? adapters_->added() : nullptr; }
  /// nullptr: all weights are trained, or none.
  const Adapters* adapters() const { return adapters_.get(); }

  /// The configuration of this process's slice.
  const ModelConfig& config() const { return decoder_.config(); }
  const ParameterLayout& layout() const { return layout_; }
  Decoder& decoder() { return decoder_; }
  /// nullptr: there are none.
  distributed::Peers* peers() const { return peers_.get(); }
  Workspace& workspace() { return workspace_; }
  at::Device device() const { return decoder_.device(); }
  bool trainable() const { return trainable_; }
  /// The weights that the optimizer updates: float32 master weights if dtype is bfloat16, otherwise the compute weights
  /// themselves; in an adapted model the adapters.
  const at::Tensor& masters() const { return adapters_ ? adapters_->masters() : masters_; }
  /// The memory layout of masters(), gradients and optimizer state.
  const ParameterLayout& trained_layout() const { return adapters_ ? adapters_->layout() : layout_; }
  /// The gradients that a backward pass adds to, as views of `flat`, a buffer in that layout.
  GradientViews gradient_views(const at::Tensor& flat) {
    return adapters_ ? adapters_->gradient_views(flat) : GradientViews(config(), layout_, flat, routers_are_frozen_);
  }
  /// The weights that the other processes of a run need after an update, in the layout of masters().
  const at::Tensor& updated() const { return adapters_ ? adapters_->masters() : compute(); }
  /// Keeps only the master weights, or remainders, [begin, end), because other processes keep the others. Does nothing
  /// if the master weights are the compute weights.
  void keep_master_shard(std::int64_t begin, std::int64_t end);
  /// Keeps of the master weights only what the compute weights lack (ops::split_weights): remainders(), int16. The
  /// model then has no masters(). For a bfloat16 model with trained weights.
  void split_masters();
  const at::Tensor& remainders() const { return remainders_; }
  /// The offset of masters() or remainders() in compute(): 0 unless only a shard is kept.
  std::int64_t masters_begin() const { return masters_begin_; }
  /// What `spec` of layout().blocks names: the quantised matrix of whose rows it is some, uint8 [rows, bytes of a row],
  /// or a buffer, [rows] A.
  at::Tensor blocks(const BlockSpec& spec) const;
  /// The weights that matrix products read, except quantised matrices.
  const at::Tensor& compute() const { return decoder_.parameters().flat; }
  bool has_separate_masters() const { return !adapters_ && masters_.defined() && !masters_.is_same(compute()); }
  /// Generation's activations under the current weights, for the first update after it. Only on the CPU; empty until it
  /// is given memory.
  KeptActivations& kept() { return kept_; }
  /// Returns the packed weights (ops/packed_weights.h) for a step of `rows` rows, or nullptr if the step must read the
  /// weights in place. Weights are packed once `after` steps with few rows have run since the weights changed; steps
  /// with many rows never use packed weights. With experts, the rows of an expert count, because most weights are
  /// theirs.
  const ops::PackedWeights* packed_for(std::int64_t rows, std::int64_t after);
  std::int64_t packed_bytes() const { return packed_.bytes(); }
  /// Drops all data derived from the old weights. Must be called after the compute weights were written.
  void weights_changed();
  /// Rounds the master weights into the compute copy if there is one, or updates the weights for the adapters. Must be
  /// called after masters() were written.
  void masters_changed();

  /// Returns a digest of the compute weights, quantised matrices, buffers and unmerged adapters: FNV-1a over blocks of
  /// their bytes, combined in order. With peers it covers all slices, and all peers must call it together.
  std::uint64_t digest() const;

 private:
  DecoderModel(ModelConfig slice, at::ScalarType dtype, bool trainable, at::Device device,
               std::shared_ptr<distributed::Peers> peers);
  DecoderModel(const DecoderModel& adapted, DecoderParameters base);
  std::shared_ptr<distributed::Peers> peers_;
  ParameterLayout layout_;
  bool trainable_, routers_are_frozen_ = false;
  at::Tensor masters_, remainders_;
  std::int64_t masters_begin_ = 0;
  Decoder decoder_;
  std::unique_ptr<Adapters> adapters_;
  Workspace workspace_;
  KeptActivations kept_;
  ops::PackedWeights packed_;
  std::int64_t steps_of_few_rows_ = 0;  ///< since the weights changed
  bool is_packed_ = false;
};

}  // namespace nemo_rl::model
