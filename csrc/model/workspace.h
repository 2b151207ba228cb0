// Buffers that are reused, because glibc returns large blocks to the system: a new tensor in each step would cost a
// page fault per 4 KiB.
#pragma once
#include <array>
#include <vector>

#include "runtime/large_tensor.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {

/// The buffers of a forward and a backward pass, by content. Forward pass, recomputation and backward pass share a
/// buffer of the same name. Letters as in decoder.h; U: rows requested of a head.
enum class Slot {
  h,                ///< [T, D] residual stream of a forward pass that keeps nothing
  h_next,           ///< [T, D] the second of two alternating buffers
  recomputed,       ///< [T, D] the stream after a layer that is recomputed for its backward pass
  normed,           ///< [T, D] a layer's or the MLP's normalised input
  gate_up,          ///< [T, 2I] gates and ups of a forward pass that keeps nothing, if the activation is not fused
  act,              ///< [T, I] gated activation
  branch_out,       ///< [T, D] output of attention or the MLP, if a norm follows
  branch,           ///< [T, D] the same, normalised
  rows_attn,        ///< [R, N·H] input of the last layer's output projection, for the requested rows
  rows_h,           ///< [R, D] their residual stream
  rows_normed,      ///< [R, D] their final norm
  logits,           ///< [R, V]
  own_logits,       ///< [R, vocabulary entries of this process], if the vocabulary is split
  dh,               ///< [T, D] gradient of the residual stream
  dy,               ///< [T, D] the same in the compute type
  d_act,            ///< [T, I]
  d_gate_up,        ///< [T, 2I]
  d_normed,         ///< [T, D]
  d_branch,         ///< [T, D] gradient after the norm of `branch`
  mixed,            ///< [T, N·H] input of a layer's output projection, if it is not the result of attention
  d_attn,           ///< [T, N·H] its gradient
  d_qkv,            ///< [T, (N+2K)H]
  d_mixer_raw,      ///< gradient of a layer's input projection, if it is not d_qkv
  latent,           ///< [T, rank] a latent of queries, or of keys and values, normalised
  expanded,         ///< [T, N(H - R + V')] keys and values from their latent, or their gradient
  d_shared_key,     ///< [T, R] gradient of the part of the keys that heads share
  expert_logits,    ///< [T, E] logits of a router
  expert_d_logits,  ///< [T, E] their gradient in the compute type
  expert_x,         ///< [T · chosen, D] a layer's tokens, sorted by expert
  expert_dy,        ///< [T · chosen, D] the gradients of their results
  expert_gate_up,   ///< [T · chosen, 2I]
  expert_act,       ///< [T · chosen, I]
  expert_d_act,     ///< [T · chosen, I]
  expert_y,         ///< [T · chosen, D] their results, or the gradients of expert_x
  latent_x,         ///< [T, L] what latent experts read
  latent_y,         ///< [T, L] their sum, or the gradient of latent_x
  latent_dy,        ///< [T, L] gradients in the compute type
  shared_y,         ///< [T, D] output of the shared expert
  experts_out,      ///< [T, D] output of experts beside an MLP
  d_inner,          ///< [T, D] gradient of the output or of the input of one of the two
  dy_inner,         ///< [T, D] the same in the compute type
  adapter_x,        ///< [T, parts · dim] a matrix's input times the A of its adapters
  adapter_input,    ///< [T, in] a matrix's input in the accumulation type
  adapter_inner,    ///< [T, parts · dim] the same times A
  adapted,          ///< [n, out] a matrix's results before rounding, of some rows
  adapter_y,        ///< [T, parts · dim] its output's gradient times their B
  per_layer,        ///< [T, L·P] the per-layer inputs of all layers (L)
  d_per_layer,      ///< [T, L·P] gradient of `per_layer`
  head_hidden,      ///< [U, D] rows that the head reads
  head_normed,      ///< [U, D]
  head_rstd,        ///< [U, 1]
  head_d_normed,    ///< [U, D]
  head_d_hidden,    ///< [U, D]
  head_values,      ///< [U, 1]
  head_d_values,    ///< [U, 1] sums over a row's pairs
  head_d_values_rounded,  ///< [U, 1] the same in the compute type
  count_,
};

/// The activations of one layer that a backward pass reads; see layer_activations.h.
enum class LayerSlot {
  h_in,
  rstd_in,
  qkv_raw,
  q_rstd,
  k_rstd,
  v_rstd,
  qkv,
  attn,
  lse,
  attn_branch,
  attn_branch_rstd,
  h_mid,
  rstd_mid,
  gate_up,
  shared_gate_up,
  latent,
  shared_branch,
  shared_branch_rstd,
  experts_branch,
  experts_branch_rstd,
  mlp_branch,
  mlp_branch_rstd,
  h_per_layer,
  per_layer,
  per_layer_branch,
  per_layer_branch_rstd,
  keys_values,    ///< [T, 2KH] of a layer whose keys and values later layers read
  d_keys_values,  ///< [T, 2KH] A: the sum of their gradients from these layers
  count_
};

template <class Enum>
constexpr std::size_t slot_index(Enum slot) {
  return static_cast<std::size_t>(slot);
}

class Workspace {
 public:
  explicit Workspace(at::Device device = at::kCPU) : device_(device) {}
  at::Device device() const { return device_; }

  /// Returns a tensor of this shape and dtype in `slot`; its contents are undefined. A second call for the slot may
  /// return the same memory, whatever the shape.
  at::Tensor take(Slot slot, at::IntArrayRef shape, at::ScalarType dtype) {
    return take(buffers_[slot_index(slot)], shape, dtype);
  }
  /// The same for one layer.
  at::Tensor take(std::int64_t layer, LayerSlot slot, at::IntArrayRef shape, at::ScalarType dtype) {
    if (layers_.size() <= static_cast<std::size_t>(layer)) layers_.resize(static_cast<std::size_t>(layer) + 1);
    return take(layers_[static_cast<std::size_t>(layer)][slot_index(slot)], shape, dtype);
  }

  void clear() {
    buffers_ = {};
    layers_.clear();
  }
  /// The addresses of the buffers.
  std::vector<const void*> places() const {
    std::vector<const void*> all;
    for_each([&](const at::Tensor& buffer) { all.push_back(buffer.const_data_ptr()); });
    return all;
  }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for_each([&](const at::Tensor& buffer) { sum += buffer.numel(); });
    return sum;
  }

 private:
  at::Tensor take(at::Tensor& buffer, at::IntArrayRef shape, at::ScalarType dtype) const {
    std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
    for (auto n : shape) bytes *= n;
    if (!buffer.defined() || buffer.numel() < bytes)
      buffer =
          runtime::empty_large({bytes + bytes / 8 + 64}, at::TensorOptions().dtype(at::kByte).device(device_), bytes);
    return buffer.narrow(0, 0, bytes).view(dtype).view(shape);
  }
  template <class F>
  void for_each(F&& f) const {
    for (const auto& buffer : buffers_)
      if (buffer.defined()) f(buffer);
    for (const auto& layer : layers_)
      for (const auto& buffer : layer)
        if (buffer.defined()) f(buffer);
  }

  at::Device device_;
  std::array<at::Tensor, slot_index(Slot::count_)> buffers_;
  std::vector<std::array<at::Tensor, slot_index(LayerSlot::count_)>> layers_;
};

}  // namespace nemo_rl::model
