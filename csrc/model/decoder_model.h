// The weights of one model and what reads them. Trainer and engine hold the same DecoderModel, so that a weight is
// stored once and an update is seen by both at once.
#pragma once
#include <memory>

#include "model/activations.h"
#include "model/adapters.h"
#include "model/lm_head.h"
#include "model/value_head.h"
#include "ops/packed_weights.h"

namespace nemo_rl::model {

class DecoderModel {
 public:
  /// `dtype`: float32, bfloat16 or float64. A bfloat16 model that is trained keeps float32 master weights beside the
  /// rounded copy it computes with; a frozen one only the copy. A quantised one is frozen, on the CPU, in float32 or
  /// bfloat16.
  /// Weights, workspace and what is computed with them lie on `device`: the CPU or a CUDA device (float32 and
  /// bfloat16).
  /// `peers`: the processes that hold this model in slices, each a part of the heads, of the MLP and of the vocabulary
  /// (tensor parallelism, on the CPU); nullptr: all of it is here. `config` is the whole model's.
  DecoderModel(ModelConfig config, at::ScalarType dtype, bool trainable, at::Device device = at::kCPU,
               std::shared_ptr<distributed::Communicator> peers = nullptr);

  /// Trains low-rank adapters of a model that was built as a frozen one and has its weights, in place of the weights.
  /// They are zero: the caller draws A in masters() and says masters_changed().
  void adapt(const LoraConfig& lora);
  /// The model without its adapters: a frozen one on the same memory, with a separate workspace. Several models with
  /// adapters apart share one base: each is base() of a frozen model, adapted.
  std::shared_ptr<DecoderModel> base() const;
  /// The weights with the adapters in them, [layout().total]: compute(), or a copy where adapters are apart.
  at::Tensor merged() const;
  /// Adapters that products add; nullptr: there are none, or they are merged.
  const AddedAdapters* adds_adapters() const { return adapters_ ? adapters_->added() : nullptr; }
  /// nullptr: all weights are trained, or none.
  const Adapters* adapters() const { return adapters_.get(); }

  /// Of this process's slice.
  const ModelConfig& config() const { return decoder_.config(); }
  const ParameterLayout& layout() const { return layout_; }
  Decoder& decoder() { return decoder_; }
  /// nullptr: there are none.
  distributed::Peers* peers() const { return peers_.get(); }
  Workspace& workspace() { return workspace_; }
  at::Device device() const { return decoder_.device(); }
  bool trainable() const { return trainable_; }
  /// What the optimizer updates: float32 (float64) masters; the compute weights themselves unless dtype is bfloat16; of
  /// an adapted model its adapters.
  const at::Tensor& masters() const { return adapters_ ? adapters_->masters() : masters_; }
  /// How masters(), gradients and optimizer state lie in memory.
  const ParameterLayout& trained_layout() const { return adapters_ ? adapters_->layout() : layout_; }
  /// What a backward adds to, for a flat buffer in that layout.
  GradientViews gradient_views(const at::Tensor& flat) const {
    return adapters_ ? adapters_->gradient_views(flat) : GradientViews(config(), layout_, flat);
  }
  /// What other processes of a run need of an update: in the layout of masters().
  const at::Tensor& updated() const { return adapters_ ? adapters_->masters() : compute(); }
  /// Keeps the masters of the elements [begin, end) alone, where other processes keep the others'. Nothing to do where
  /// the masters are the compute weights.
  void keep_master_shard(std::int64_t begin, std::int64_t end);
  /// Where masters() begins in compute(): 0 unless a shard is kept.
  std::int64_t masters_begin() const { return masters_begin_; }
  /// The matrix in blocks, or the part of it, that `spec` of layout().blocks names: uint8 [rows, bytes of a row].
  at::Tensor blocks(const BlockSpec& spec) const;
  /// What products read, but for matrices in blocks.
  const at::Tensor& compute() const { return decoder_.parameters().flat; }
  bool has_separate_masters() const { return !adapters_ && masters_.defined() && !masters_.is_same(compute()); }
  /// What generation computed with these very weights, for the first update after it (on the CPU; nothing until it is
  /// given memory).
  KeptActivations& kept() { return kept_; }
  /// For a step of so many rows: the weights packed (ops/packed_weights.h), which happens once `after` steps of few
  /// rows have run since they changed; nullptr: as they are, because the rows are many, or so few such steps do not pay
  /// for it.
  const ops::PackedWeights* packed_for(std::int64_t rows, std::int64_t after);
  std::int64_t packed_bytes() const { return packed_.bytes(); }
  /// After the compute weights were written: drops what was made of the old ones.
  void weights_changed();
  /// After masters were written: rounds them into the compute copy (nothing to do when they are one), or makes the
  /// effective weights of adapters.
  void masters_changed();

  /// FNV-1a over the bytes of the compute weights (and of matrices in blocks and of adapters apart), in blocks that are
  /// combined in order: equal digests, equal weights. With peers of all slices, by all of them at once.
  std::uint64_t digest() const;

 private:
  DecoderModel(ModelConfig slice, at::ScalarType dtype, bool trainable, at::Device device,
               std::shared_ptr<distributed::Peers> peers);
  DecoderModel(const DecoderModel& adapted, DecoderParameters base);
  std::shared_ptr<distributed::Peers> peers_;
  ParameterLayout layout_;
  bool trainable_;
  at::Tensor masters_;
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
