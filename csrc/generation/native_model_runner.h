// The engine's model runner on the native decoder. It reads the trainer's weights in place.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "generation/kept_rows.h"
#include "generation/model_runner.h"
#include "generation/recorded_steps.h"
#include "kernels/product_figures.h"
#include "model/decoder_model.h"
#include "model/vocab_slice.h"
#include "ops/paged_step.h"

namespace nemo_rl::generation {

class NativeModelRunner : public ModelRunner {
 public:
  /// The number of steps with few rows after which packing the weights pays off: such steps read a packed copy faster.
  static constexpr std::int64_t kPackAfter = kernels::kPackAfter;
  static constexpr std::int64_t kNeverPack = INT64_MAX;

  /// `recorder`: captures decode steps as CUDA graphs (RecordedSteps); none: all steps are launched kernel by kernel.
  /// `pack_after`: the number of steps with few rows, since the weights changed, that read the weights in place; later
  /// ones read a packed copy (ops/packed_weights.h).
  explicit NativeModelRunner(std::shared_ptr<model::DecoderModel> model, RecordedSteps::Recorder recorder = {},
                             std::int64_t pack_after = kPackAfter);
  std::int64_t vocab_size() const override;
  std::int64_t vocab_block() const override { return model_->config().vocab_block(); }
  std::int64_t block_size() const override;
  std::vector<CachePool> cache_pools() const override { return pools_; }
  void allocate_cache(const std::vector<std::int64_t>& num_blocks) override;
  bool has_states() const override { return model_->config().has_recurrent(); }
  void allocate_states(std::int64_t count) override;
  std::int64_t draft_rows() const override { return draft_rows_; }
  void set_draft_rows(std::int64_t rows);
  void release_cache() override;
  void keep_activations(bool keep) override { keep_ = keep; }
  void check_adapted(const model::DecoderModel* adapted) const override;
  at::Tensor forward(const ForwardBatch& batch) override;
  at::Device device() const { return model_->device(); }

 private:
  model::History history(const ForwardBatch& batch);
  std::size_t pool_of(std::size_t layer) const;
  void set_steps(const ForwardBatch& batch, std::int64_t rows);
  void run(std::span<const std::int64_t> rows, const model::History& history, const ops::PackedWeights* packed,
           model::RowAdapters adapters = {});
  void run_keeping(const ForwardBatch& batch, const model::History& history, const ops::PackedWeights* packed);
  void finish(const at::Tensor& h, const ops::PackedWeights* packed);
  at::Tensor logits(std::int64_t rows);
  std::vector<const void*> places() const;

  std::shared_ptr<model::DecoderModel> model_;
  model::VocabSlice vocab_;
  std::vector<CachePool> pools_;   ///< by ascending window
  std::vector<at::Tensor> cache_;  ///< of each layer with attention
  std::vector<std::int64_t> num_blocks_;
  std::vector<model::RecurrentState> states_;  ///< of each layer, undefined without recurrence
  model::Workspace workspace_;
  std::vector<ops::PagedStep> steps_;      ///< of each pool, with the same tokens
  std::vector<ops::PagedStep> row_steps_;  ///< the same of the tokens whose logits are requested, if attends_rows_
  bool attends_rows_ = false;
  RecordedSteps recorded_;
  std::int64_t pack_after_, draft_rows_ = 0;
  bool keep_ = false;
  KeptRows kept_rows_;
};

}  // namespace nemo_rl::generation
