// The one seam of matrix products: forward, gradient of the input, gradient of the weight.
#pragma once
#include <optional>

#include "kernels/swiglu.h"
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

class PackedWeights;  // ops/packed_weights.h

/// y[M, N] (+)= x[M, K] · w[N, K]^T + bias[N].
/// Each row of y depends on its row of x alone, bit for bit: not on M, not on the number of threads.
/// x, w (and bias) share a dtype: float32, float64, or bfloat16 with y in bfloat16 or float32 (sums are always
/// float32 at least). Rows may be strided; the last dimension is contiguous. `accumulate` adds to y.
/// w may lie in blocks instead: uint8 [N, bytes of a row] (ops/weight_blocks.h), with x in float32 or bfloat16. The
/// bits are those of w as unpack_blocks gives it in x's dtype, or in float32 on a CPU without instructions for bfloat16
/// (kernels::block_weights_are_single); strips of w are unpacked where they are read, or on a device into scratch
/// memory. `packed`: copies of weights that few rows read in their place, w's if it is among them;
/// the same bits. nullptr: none.
void linear_forward(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                    const at::Tensor& y, bool accumulate = false, const PackedWeights* packed = nullptr);

/// act[M, I] = f(gate) · up, f silu or gelu_tanh, with [gate, up] = x[M, K] · w[2I, K]^T + bias[2I], in one pass: the
/// same bits as linear_forward into gate_up and swiglu_forward of it. gate_up [M, 2I] is written when it is defined.
/// All in one dtype, but w where it lies in blocks.
void linear_swiglu(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                   const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation,
                   const PackedWeights* packed = nullptr);

/// The next product reads w (of linear_swiglu: `gated`): threads of a team (runtime/team.h) that wait for it read their
/// part into their caches.
void linear_ask_ahead(const at::Tensor& w, bool gated = false, const PackedWeights* packed = nullptr);

/// dx[M, K] (+)= dy[M, N] · w[N, K]; w may lie in blocks.
void linear_backward_input(const at::Tensor& dy, const at::Tensor& w, const at::Tensor& dx, bool accumulate = false);

/// dw[N, K] += dy[M, N]^T · x[M, K]; dw is float32 (float64 for float64 operands).
void linear_backward_weight(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& dw);

using LinearForwardLauncher = void(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
                                   const at::Tensor& y, bool accumulate);
extern runtime::CudaSlot<LinearForwardLauncher> linear_forward_cuda;
/// c (+)= a · b or a^T · b, for both backward products.
using GemmLauncher = void(const at::Tensor& a, bool transposed, const at::Tensor& b, const at::Tensor& c,
                          bool accumulate, const char* op);
extern runtime::CudaSlot<GemmLauncher> linear_backward_cuda;

}  // namespace nemo_rl::ops
