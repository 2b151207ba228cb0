// What one decoder layer computes for T packed tokens and its backward reads again.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>

namespace nemo_rl::model {

/// Letters and types as in decoder.h. Normalised inputs and the gated activation are missing: they are cheap to recompute.
struct LayerActivations {
  at::Tensor h_in;      ///< [T, D] A: the residual stream before the layer
  at::Tensor rstd_in;   ///< [T, 1] A
  at::Tensor qkv_raw;   ///< [T, (N+2K)H] S before qk-norm (only with qk-norm)
  at::Tensor q_rstd, k_rstd;
  at::Tensor qkv;       ///< [T, (N+2K)H] S after bias, qk-norm and RoPE
  at::Tensor attn;      ///< [T, N·H] S
  at::Tensor lse;       ///< [T, N] A
  at::Tensor h_mid;     ///< [T, D] A: after attention
  at::Tensor rstd_mid;  ///< [T, 1] A
  at::Tensor gate_up;   ///< [T, 2I] S

  /// All of them, some undefined; each is contiguous with one row a token.
  std::array<at::Tensor, 11> all() const { return {h_in, rstd_in, qkv_raw, q_rstd, k_rstd, qkv, attn, lse, h_mid, rstd_mid, gate_up}; }
};

}  // namespace nemo_rl::model
