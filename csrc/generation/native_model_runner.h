// The engine's model runner on our own decoder: the trainer's weights, read in place.
#pragma once
#include <memory>
#include <vector>

#include "generation/model_runner.h"
#include "model/decoder_model.h"
#include "ops/attention.h"

namespace nemo_rl::generation {

class NativeModelRunner : public ModelRunner {
 public:
  explicit NativeModelRunner(std::shared_ptr<model::DecoderModel> model);
  std::int64_t vocab_size() const override;
  std::int64_t block_size() const override;
  std::int64_t bytes_per_block() const override;
  void allocate_cache(std::int64_t num_blocks) override;
  void release_cache() override;
  at::Tensor forward(const ForwardBatch& batch) override;
  at::Device device() const { return model_->device(); }

 private:
  std::shared_ptr<model::DecoderModel> model_;
  ops::AttentionHeads heads_;
  std::vector<at::Tensor> cache_;  ///< of each layer
  model::Workspace workspace_;
};

}  // namespace nemo_rl::generation
