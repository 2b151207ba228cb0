// Gated activation and its gradient.
#pragma once
#include <ATen/core/Tensor.h>

namespace nemo_rl::ops {

/// act [T, I] = silu(gate) · up, gate_up [T, 2I] with the gate first.
void swiglu_forward(const at::Tensor& gate_up, const at::Tensor& act);

/// d_gate_up [T, 2I] from d_act [T, I]; d_gate_up may be gate_up itself.
void swiglu_backward(const at::Tensor& d_act, const at::Tensor& gate_up, const at::Tensor& d_gate_up);

}  // namespace nemo_rl::ops
