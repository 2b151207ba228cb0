// The parts of a gated delta net on packed sequences: the short convolution, the gated delta rule and its norm, each
// with its gradient; and the gate of the attention that such nets stand between. kernels/gated_delta.h, short_conv.h
// and gated_norm.h hold the formulas and the order of the sums. They run on the CPU.
#pragma once
#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "kernels/attention.h"
#include "kernels/recurrence.h"

namespace nemo_rl::ops {

using kernels::GatedDeltaShape;
using kernels::RecurrentSequence;

/// Packed sequences of attention as those of a recurrence: a shared prefix is the whole of an earlier sequence. Throws
/// ArgumentError for another one.
std::vector<RecurrentSequence> recurrent_sequences(std::span<const kernels::AttentionSequence> sequences);

/// Throws ArgumentError for sizes that the kernels do not have.
void check_shape(const GatedDeltaShape& shape);

/// y [T, C] = silu(convolution of x [T, C]) with w [C, W]. `state` [slots, W - 1, C] holds the last inputs of sequences
/// that have a slot; undefined where none has one.
void short_conv_forward(const at::Tensor& x, const at::Tensor& w, std::span<const RecurrentSequence> sequences,
                        const at::Tensor& y, const at::Tensor& state = {});
/// dx [T, C] from dy [T, C], and dw [C, W] += the gradient of w (undefined: not wanted).
void short_conv_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w,
                         std::span<const RecurrentSequence> sequences, const at::Tensor& dx, const at::Tensor& dw);

/// What the gated delta rule reads. Rows of qkv, b and a may be parts of longer ones.
struct GatedDeltaInputs {
  at::Tensor qkv;      ///< [T, conv_size]
  at::Tensor b, a;     ///< [T, U]
  at::Tensor A_log;    ///< [U]
  at::Tensor dt_bias;  ///< [U]
};
/// out [T, U·dv]. `state` [slots, U, dk·dv], in the accumulation type, holds the states of sequences that have a slot.
void gated_delta_forward(const GatedDeltaInputs& in, std::span<const RecurrentSequence> sequences,
                         const GatedDeltaShape& shape, const at::Tensor& out, const at::Tensor& state = {});
/// d.qkv, d.b and d.a are overwritten; the gradients of A_log and dt_bias are added to d.A_log and d.dt_bias, in the
/// accumulation type (undefined: not wanted). A sequence that others continue gathers from them in their order, so the
/// bits do not depend on threads.
void gated_delta_backward(const at::Tensor& d_out, const GatedDeltaInputs& in,
                          std::span<const RecurrentSequence> sequences, const GatedDeltaShape& shape,
                          const GatedDeltaInputs& d);

/// y [T, heads·D] of x and the gate z, w [D].
void gated_norm_forward(const at::Tensor& x, const at::Tensor& z, const at::Tensor& w, double eps, const at::Tensor& y);
/// dx (may be dy) and dz; dw [D] += the gradient of w (undefined: not wanted).
void gated_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& z, const at::Tensor& w,
                         double eps, const at::Tensor& dx, const at::Tensor& dz, const at::Tensor& dw);

/// y [T, N·H] = x · sigmoid(g) of each head; g [T, N, H], whose heads may lie apart.
void head_gate_forward(const at::Tensor& x, const at::Tensor& g, const at::Tensor& y);
/// dx (may be dy) and dg, which has the strides of g.
void head_gate_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& g, const at::Tensor& dx,
                        const at::Tensor& dg);

}  // namespace nemo_rl::ops
