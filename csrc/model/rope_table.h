// The RoPE table: cos and sin of rotary position embeddings (Su et al., 2021) for the positions used so far.
#pragma once
#include <vector>

#include "model/config.h"

namespace nemo_rl::model {

/// cos and sin of every position, [P, R/2] float32. `reserve` extends them.
class RopeTable {
 public:
  RopeTable(RopeConfig config, at::Device device) : config_(std::move(config)), device_(device) {}
  void reserve(std::int64_t positions);
  const at::Tensor& cos() const { return cos_; }
  const at::Tensor& sin() const { return sin_; }

 private:
  RopeConfig config_;
  at::Device device_;
  at::Tensor cos_, sin_;
};

}  // namespace nemo_rl::model
