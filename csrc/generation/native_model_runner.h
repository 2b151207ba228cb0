// The engine's model runner on our own decoder: the trainer's weights, read in place.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "generation/kept_rows.h"
#include "generation/model_runner.h"
#include "generation/recorded_steps.h"
#include "model/decoder_model.h"
#include "ops/paged_step.h"

namespace nemo_rl::generation {

class NativeModelRunner : public ModelRunner {
 public:
  /// `recorder`: decode steps are recorded and launched as a whole (RecordedSteps); none: all steps run as they are.
  explicit NativeModelRunner(std::shared_ptr<model::DecoderModel> model, RecordedSteps::Recorder recorder = {});
  std::int64_t vocab_size() const override;
  std::int64_t block_size() const override;
  std::int64_t bytes_per_block() const override;
  void allocate_cache(std::int64_t num_blocks) override;
  void release_cache() override;
  void keep_activations(bool keep) override { keep_ = keep; }
  at::Tensor forward(const ForwardBatch& batch) override;
  at::Device device() const { return model_->device(); }

 private:
  model::Attention attention();
  void run(std::span<const std::int64_t> rows);
  void run_keeping(const ForwardBatch& batch);
  void finish(const at::Tensor& h);
  at::Tensor logits(std::int64_t rows);
  std::vector<const void*> places() const;

  std::shared_ptr<model::DecoderModel> model_;
  std::vector<at::Tensor> cache_;  ///< of each layer
  model::Workspace workspace_;
  ops::PagedStep step_;
  RecordedSteps recorded_;
  bool keep_ = false;
  KeptRows kept_rows_;
};

}  // namespace nemo_rl::generation
