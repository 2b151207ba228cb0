#include "model/latent_attention.h"

#include "common/check.h"
#include "ops/rms_norm.h"
#include "ops/rope.h"
#include "runtime/tensor.h"

namespace nemo_rl::model {
namespace {

constexpr double kEps = 1e-6;  // of the latents' norms, whatever rms_norm_eps is, as in transformers

}  // namespace

LatentAttention::LatentAttention(const ModelConfig& config, std::int64_t layer)
    : c_(config), s_(*config.latent), layer_(layer) {
  NRL_CHECK_ARG(c_.num_heads == c_.num_kv_heads && s_.rope_dim > 0 && nope_dim() > 0 && s_.rank > 0 &&
                    s_.value_dim > 0 && s_.value_dim <= c_.head_dim,
                "latent attention with ", c_.num_kv_heads, " key heads of ", c_.num_heads, ", heads of ", c_.head_dim,
                " with ", s_.rope_dim, " rotated dimensions, values of ", s_.value_dim, " and rank ", s_.rank);
}

std::vector<LayerTensor> LatentAttention::tensors() const {
  using P = LayerParameters;
  const std::int64_t D = c_.hidden_size, kv = c_.num_heads * (nope_dim() + s_.value_dim);
  const bool has_latent = s_.query_rank > 0;
  std::vector<LayerTensor> all{
      {&P::qkv_weight,
       {{has_latent ? "self_attn.q_a_proj.weight" : "self_attn.q_proj.weight", query_columns()},
        {"self_attn.kv_a_proj_with_mqa.weight", s_.rank + s_.rope_dim}},
       D}};
  if (has_latent) {
    all.push_back({&P::q_norm, {{"self_attn.q_a_layernorm.weight", s_.query_rank}}});
    all.push_back({&P::q_b_weight, {{"self_attn.q_b_proj.weight", c_.query_size()}}, s_.query_rank});
  }
  all.push_back({&P::k_norm, {{"self_attn.kv_a_layernorm.weight", s_.rank}}});
  all.push_back({&P::kv_b_weight, {{"self_attn.kv_b_proj.weight", kv}}, s_.rank});
  all.push_back({&P::o_weight, {{"self_attn.o_proj.weight", D}}, columns()});
  return all;
}

Mixer::Kept LatentAttention::kept() const {
  const std::int64_t raw = query_columns() + s_.rank + s_.rope_dim;
  return {raw, c_.qkv_size(), c_.query_size(), s_.query_rank > 0 ? 1 : 0, 1, c_.num_heads};
}

LatentAttention::Latent LatentAttention::queries() const {
  return {&LayerParameters::q_norm, &LayerParameters::q_b_weight, 0, s_.query_rank, &LayerActivations::q_rstd};
}

LatentAttention::Latent LatentAttention::keys_values() const {
  return {&LayerParameters::k_norm, &LayerParameters::kv_b_weight, query_columns(), s_.rank, &LayerActivations::k_rstd};
}

at::Tensor LatentAttention::part(const at::Tensor& qkv, std::int64_t which, std::int64_t begin,
                                 std::int64_t count) const {
  return qkv.view({qkv.size(0), 3, c_.num_heads, c_.head_dim}).select(1, which).narrow(2, begin, count);
}

at::Tensor LatentAttention::expanded_part(const at::Tensor& expanded, std::int64_t which) const {
  const auto heads = expanded.view({expanded.size(0), c_.num_heads, nope_dim() + s_.value_dim});
  return which == 0 ? heads.narrow(2, 0, nope_dim()) : heads.narrow(2, nope_dim(), s_.value_dim);
}

at::Tensor LatentAttention::expanded(std::int64_t T, at::ScalarType S, Workspace& workspace) const {
  return workspace.take(Slot::expanded, {T, c_.num_heads * (nope_dim() + s_.value_dim)}, S);
}

/// Fills the latent's rstd if it is defined.
at::Tensor LatentAttention::normalised(const LayerParameters& p, const Latent& latent, const LayerActivations& a,
                                       Workspace& workspace) const {
  const auto y = workspace.take(Slot::latent, {a.qkv_raw.size(0), latent.rank}, a.qkv_raw.scalar_type());
  ops::rms_norm_forward(a.qkv_raw.narrow(1, latent.begin, latent.rank), p.*latent.norm, kEps, 0, y,
                        if_defined(a.*latent.rstd));
  return y;
}

/// Rotates the last R dimensions of all query and key heads.
void LatentAttention::rotate(const at::Tensor& qkv, const MixerStep& step, bool inverse) const {
  const std::int64_t heads = 2 * c_.num_heads, columns = (heads - 1) * c_.head_dim + s_.rope_dim;
  ops::rope(qkv.narrow(1, nope_dim(), columns), heads, c_.head_dim, step.rows.positions, step.rope->cos(),
            step.rope->sin(), inverse, c_.rope_interleaved);
}

at::Tensor LatentAttention::forward(const LayerWeights& w, const at::Tensor& x, LayerActivations& a,
                                    const MixerStep& step) const {
  using P = LayerParameters;
  const std::int64_t T = x.size(0), Q = c_.query_size(), H = c_.head_dim, V = s_.value_dim, R = s_.rope_dim;
  w.forward(&P::qkv_weight, x, {}, a.qkv_raw);
  const auto q = a.qkv.narrow(1, 0, Q);
  if (s_.query_rank > 0) w.forward(&P::q_b_weight, normalised(w.tensors(), queries(), a, step.workspace), {}, q);
  else q.copy_(a.qkv_raw.narrow(1, 0, Q));
  const auto kv = expanded(T, x.scalar_type(), step.workspace);
  w.forward(&P::kv_b_weight, normalised(w.tensors(), keys_values(), a, step.workspace), {}, kv);
  w.ask_ahead(&P::o_weight);
  part(a.qkv, 1, 0, nope_dim()).copy_(expanded_part(kv, 0));
  part(a.qkv, 1, nope_dim(), R).copy_(a.qkv_raw.narrow(1, query_columns() + s_.rank, R).unsqueeze(1));
  part(a.qkv, 2, 0, V).copy_(expanded_part(kv, 1));
  part(a.qkv, 2, V, H - V).zero_();
  rotate(a.qkv, step, /*inverse=*/false);
  step.history.attention(layer_, a.qkv, a.attn, a.lse);
  return result(w.tensors(), a, step.workspace);
}

at::Tensor LatentAttention::result(const LayerParameters&, const LayerActivations& a, Workspace& workspace) const {
  const std::int64_t T = a.attn.size(0), N = c_.num_heads, V = s_.value_dim;
  if (V == c_.head_dim) return a.attn;
  const auto y = workspace.take(Slot::mixed, {T, N * V}, a.attn.scalar_type());
  y.view({T, N, V}).copy_(a.attn.view({T, N, c_.head_dim}).narrow(2, 0, V));
  return y;
}

/// The gradient of the shared part of the keys is the sum over the heads, in their order.
at::Tensor LatentAttention::backward(const LayerWeights& w, const at::Tensor& d_result, const LayerActivations& a,
                                     const LayerGradients& grads, const MixerStep& step) const {
  const std::int64_t T = d_result.size(0), N = c_.num_heads, H = c_.head_dim, V = s_.value_dim, R = s_.rope_dim;
  const auto S = d_result.scalar_type();
  auto& workspace = step.workspace;
  auto d_attn = d_result;
  if (V < H) {
    d_attn = workspace.take(Slot::mixed, {T, N * H}, S);
    const auto heads = d_attn.view({T, N, H});
    heads.narrow(2, 0, V).copy_(d_result.view({T, N, V}));
    heads.narrow(2, V, H - V).zero_();
  }
  auto d_qkv = workspace.take(Slot::d_qkv, a.qkv.sizes(), S);
  step.history.attention_backward(layer_, a.qkv, a.attn, d_attn, a.lse, d_qkv);
  rotate(d_qkv, step, /*inverse=*/true);
  const auto d_raw = workspace.take(Slot::d_mixer_raw, a.qkv_raw.sizes(), S);
  const auto d_kv = expanded(T, S, workspace);
  expanded_part(d_kv, 0).copy_(part(d_qkv, 1, 0, nope_dim()));
  expanded_part(d_kv, 1).copy_(part(d_qkv, 2, 0, V));
  backward_latent(w, keys_values(), d_kv, a, d_raw, grads, workspace);
  const auto d_shared = workspace.take(Slot::d_shared_key, {T, R}, a.lse.scalar_type()).zero_();
  for (std::int64_t n = 0; n < N; ++n) d_shared.add_(part(d_qkv, 1, nope_dim(), R).select(1, n));
  d_raw.narrow(1, query_columns() + s_.rank, R).copy_(d_shared);
  const auto d_q = d_qkv.narrow(1, 0, c_.query_size());
  if (s_.query_rank > 0) backward_latent(w, queries(), d_q, a, d_raw, grads, workspace);
  else d_raw.narrow(1, 0, c_.query_size()).copy_(d_q);
  return d_raw;
}

/// The latent's columns of d_raw = its gradient, from dy, that of its matrix product.
void LatentAttention::backward_latent(const LayerWeights& w, const Latent& latent, const at::Tensor& dy,
                                      const LayerActivations& a, const at::Tensor& d_raw, const LayerGradients& grads,
                                      Workspace& workspace) const {
  const auto &p = w.tensors(), &g = grads.dense();
  if (grads.wants(latent.matrix)) grads.add(latent.matrix, dy, normalised(p, latent, a, workspace), workspace);
  const auto raw = a.qkv_raw.narrow(1, latent.begin, latent.rank), d_x = d_raw.narrow(1, latent.begin, latent.rank);
  w.backward_input(latent.matrix, dy, d_x);
  ops::rms_norm_backward(d_x, raw, p.*latent.norm, 0, a.*latent.rstd, d_x, /*accumulate=*/false, g.*latent.norm);
}

}  // namespace nemo_rl::model
