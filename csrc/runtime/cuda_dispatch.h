// Where an op finds its CUDA launcher. The core library knows no CUDA: the module _cuda, imported where there is a
// device, puts its launchers into these slots.
#pragma once
#include <ATen/core/Tensor.h>

#include "common/check.h"

namespace nemo_rl::runtime {

template <class Launcher>
class CudaSlot {
 public:
  explicit CudaSlot(const char* op) : op_(op) {}
  void set(Launcher* launcher) { launcher_ = launcher; }
  /// The launcher, or an error that says what is missing.
  Launcher* get(const at::Tensor& t) const {
    NRL_CHECK(launcher_ != nullptr, op_, " got a tensor of shape ", t.sizes(), " on ", t.device(),
              ", but the CUDA kernels are not loaded: build nemo_rl_cpp with NEMO_RL_CUDA=on, or move the tensors to "
              "the CPU");
    return launcher_;
  }

 private:
  const char* op_;
  Launcher* launcher_ = nullptr;
};

}  // namespace nemo_rl::runtime
