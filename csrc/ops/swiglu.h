// Gated activation and its gradient.
#pragma once
#include "ops/cuda_dispatch.h"

namespace nemo_rl::ops {

/// act [T, I] = silu(gate) · up, gate_up [T, 2I] with the gate first.
void swiglu_forward(const at::Tensor& gate_up, const at::Tensor& act);

/// d_gate_up [T, 2I] from d_act [T, I]; d_gate_up may be gate_up itself.
void swiglu_backward(const at::Tensor& d_act, const at::Tensor& gate_up, const at::Tensor& d_gate_up);

extern CudaSlot<void(const at::Tensor& gate_up, const at::Tensor& act)> swiglu_forward_cuda;
extern CudaSlot<void(const at::Tensor& d_act, const at::Tensor& gate_up, const at::Tensor& d_gate_up)> swiglu_backward_cuda;

}  // namespace nemo_rl::ops
