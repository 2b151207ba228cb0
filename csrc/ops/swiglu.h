// Gated activation and its gradient.
#pragma once
#include "kernels/swiglu.h"
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

/// act [T, I] = f(gate) · up, gate_up [T, 2I] with the gate first; f by `activation` (kernels/swiglu.h). Without a
/// gate, gate_up is [T, I] and act = f(gate_up).
void swiglu_forward(const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation = kernels::Gate::silu);

/// d_gate_up [T, 2I] from d_act [T, I]; d_gate_up may be gate_up itself.
void swiglu_backward(const at::Tensor& d_act, const at::Tensor& gate_up, const at::Tensor& d_gate_up,
                     kernels::Gate activation = kernels::Gate::silu);

extern runtime::CudaSlot<void(const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation)>
    swiglu_forward_cuda;
extern runtime::CudaSlot<void(const at::Tensor& d_act, const at::Tensor& gate_up, const at::Tensor& d_gate_up,
                              kernels::Gate activation)>
    swiglu_backward_cuda;

}  // namespace nemo_rl::ops
