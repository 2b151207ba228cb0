// cos and sin of rotary position embeddings (Su et al., 2021), as far as positions have come.
#pragma once
#include <vector>

#include "model/config.h"

namespace nemo_rl::model {

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

}  // namespace nemo_rl::model
