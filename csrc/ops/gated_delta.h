// The parts of a recurrent layer (gated delta net, Mamba-2, or the convolution of LFM2 alone) on packed sequences: the
// short convolution, the recurrence and its norm, each with its gradient; and the gate of the attention that gated
// delta nets stand between. kernels/gated_delta.h, short_conv.h and gated_norm.h hold the formulas and the order of the
// sums. Tensors are all on the CPU or on one CUDA device.
#pragma once
#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "kernels/attention.h"
#include "kernels/recurrence.h"
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

using kernels::RecurrentSequence;
using kernels::RecurrentShape;

/// Packed sequences of attention as those of a recurrence: a shared prefix is the whole of an earlier sequence. Throws
/// ArgumentError for another one.
std::vector<RecurrentSequence> recurrent_sequences(std::span<const kernels::AttentionSequence> sequences);

/// Throws ArgumentError for sizes that the kernels do not have.
void check_shape(const RecurrentShape& shape);

/// w [C, W] and bias [C] of a short convolution, or their gradients in the accumulation type; undefined: no bias, or a
/// gradient that is not wanted.
struct ShortConvWeights {
  at::Tensor w, bias;
  bool silu = true;  ///< whether silu follows the convolution
};
/// y [T, C] = silu(convolution of x [T, C]), or without silu. `state` [slots, W - 1, C] holds the last inputs of
/// sequences that have a slot; undefined where none has one.
void short_conv_forward(const at::Tensor& x, const ShortConvWeights& weights,
                        std::span<const RecurrentSequence> sequences, const at::Tensor& y,
                        const at::Tensor& state = {});
/// dx [T, C] from dy [T, C]. The gradients of the weights are added to `d`.
void short_conv_backward(const at::Tensor& dy, const at::Tensor& x, const ShortConvWeights& weights,
                         std::span<const RecurrentSequence> sequences, const at::Tensor& dx, const ShortConvWeights& d);

/// What a recurrence reads. Rows of qkv, b and a may be parts of longer ones.
struct RecurrenceInputs {
  at::Tensor qkv;      ///< [T, conv_size]: q, k, v in a gated delta net; v, k, q in Mamba-2
  at::Tensor b;        ///< [T, U]; undefined in Mamba-2
  at::Tensor a;        ///< [T, U]
  at::Tensor A_log;    ///< [U]
  at::Tensor dt_bias;  ///< [U]
  at::Tensor D;        ///< [U]; undefined in a gated delta net
};
/// out [T, U·dv]. `state` [slots, U, dk·dv], in the accumulation type and the device's own order, holds the states of
/// sequences that have a slot.
void recurrence_forward(const RecurrenceInputs& in, std::span<const RecurrentSequence> sequences,
                        const RecurrentShape& shape, const at::Tensor& out, const at::Tensor& state = {});
/// d.qkv, d.b and d.a are overwritten; the gradients of A_log, dt_bias and D are added to those of `d`, in the
/// accumulation type (undefined: not wanted). A sequence that others continue gathers from them in their order, so the
/// bits do not depend on threads.
void recurrence_backward(const at::Tensor& d_out, const RecurrenceInputs& in,
                         std::span<const RecurrentSequence> sequences, const RecurrentShape& shape,
                         const RecurrenceInputs& d);

/// y [T, heads·D] of x and the gate z. `groups` 0: w [D], a norm of each head before the gate (gated delta net).
/// Otherwise w [heads·D], a norm of each of `groups` heads after the gate (Mamba-2).
void gated_norm_forward(const at::Tensor& x, const at::Tensor& z, const at::Tensor& w, std::int64_t groups, double eps,
                        const at::Tensor& y);
/// dx (may be dy) and dz; dw += the gradient of w (undefined: not wanted).
void gated_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& z, const at::Tensor& w,
                         std::int64_t groups, double eps, const at::Tensor& dx, const at::Tensor& dz,
                         const at::Tensor& dw);

/// y [T, N·H] = x · sigmoid(g) of each head; g [T, N, H], whose heads may lie apart.
void head_gate_forward(const at::Tensor& x, const at::Tensor& g, const at::Tensor& y);
/// dx (may be dy) and dg, which has the strides of g.
void head_gate_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& g, const at::Tensor& dx,
                        const at::Tensor& dg);

extern runtime::CudaSlot<decltype(short_conv_forward)> short_conv_forward_cuda;
extern runtime::CudaSlot<decltype(short_conv_backward)> short_conv_backward_cuda;
extern runtime::CudaSlot<decltype(recurrence_forward)> recurrence_forward_cuda;
extern runtime::CudaSlot<decltype(recurrence_backward)> recurrence_backward_cuda;
extern runtime::CudaSlot<decltype(gated_norm_forward)> gated_norm_forward_cuda;
extern runtime::CudaSlot<decltype(gated_norm_backward)> gated_norm_backward_cuda;
extern runtime::CudaSlot<decltype(head_gate_forward)> head_gate_forward_cuda;
extern runtime::CudaSlot<decltype(head_gate_backward)> head_gate_backward_cuda;

}  // namespace nemo_rl::ops
