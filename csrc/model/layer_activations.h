// The activations of one decoder layer for T packed tokens, which its backward pass reads.
#pragma once
#include <ATen/core/Tensor.h>

#include <array>

namespace nemo_rl::model {

/// The output of attention or the MLP before its norm; undefined if no norm follows.
struct Branch {
  at::Tensor out;   ///< [T, D] A
  at::Tensor rstd;  ///< [T, 1] A
};

/// Letters and types as in decoder.h. Normalised inputs and the gated activation are not stored, because they are cheap
/// to recompute.
struct LayerActivations {
  at::Tensor h_in;     ///< [T, D] A: the residual stream before the layer
  at::Tensor rstd_in;  ///< [T, 1] A (if there is a norm before attention)
  at::Tensor qkv_raw;  ///< [T, (N+2K)H] S before qk-norm (only with qk-norm), or the projection of a recurrent layer
  at::Tensor q_rstd, k_rstd, v_rstd;
  at::Tensor qkv;             ///< [T, (N+2K)H] S after bias, qk-norm and RoPE, or after the short convolution
  at::Tensor attn;            ///< [T, N·H] S: the result of attention, or of a recurrence, before a gate
  at::Tensor lse;             ///< [T, N] A
  Branch attn_branch;         ///< output of attention, before its norm
  at::Tensor h_mid;           ///< [T, D] A: the residual stream after attention. Undefined: h_in is updated in place,
                              ///< or the layer has only a mixer or only an MLP
  at::Tensor rstd_mid;        ///< [T, 1] A (if there is a norm before the MLP)
  at::Tensor gate_up;         ///< [T, 2I] S; with experts [T, chosen · 2I], the expert with the highest logit first;
                              ///< without gates I in place of 2I
  at::Tensor shared_gate_up;  ///< [T, 2I] S of the shared expert
  at::Tensor latent;          ///< [T, L] S: the sum of latent experts
  Branch shared_branch;       ///< output of an MLP that has experts beside it, before its norm
  Branch experts_branch;      ///< output of these experts, before its norm
  Branch mlp_branch;          ///< output of the MLP, before its norm
  at::Tensor h_per_layer;     ///< [T, D] A: the residual stream before the branch of per-layer inputs
  at::Tensor per_layer;       ///< [T, 2P] S: its gates, and the inputs that they multiply
  Branch per_layer_branch;    ///< its output, before its norm

  /// All tensors, some undefined; each is contiguous, with one row per token.
  std::array<at::Tensor, 26> all() const {
    return {h_in,
            rstd_in,
            qkv_raw,
            q_rstd,
            k_rstd,
            v_rstd,
            qkv,
            attn,
            lse,
            attn_branch.out,
            attn_branch.rstd,
            h_mid,
            rstd_mid,
            gate_up,
            shared_gate_up,
            latent,
            shared_branch.out,
            shared_branch.rstd,
            experts_branch.out,
            experts_branch.rstd,
            mlp_branch.out,
            mlp_branch.rstd,
            h_per_layer,
            per_layer,
            per_layer_branch.out,
            per_layer_branch.rstd};
  }
};

}  // namespace nemo_rl::model
