#include "common/check.h"
#include "model/activations.h"
#include "model/decoder.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"

namespace nemo_rl::model {

void Decoder::backward(ActivationSource& source, const at::Tensor& dh, const History& history,
                       const GradientViews& grads, Workspace& workspace, const LayerDone& layer_done) {
  const auto positions = on_device(source.positions());
  const auto& dense = grads.dense();
  at::Tensor per_layer, d_per_layer;
  if (per_layer_ && source.holds_input_alone(0)) {
    const auto embedded = at::empty(dh.sizes(), dh.options());
    embed(source.token_ids(), embedded);
    per_layer = per_layer_->inputs(parameters_, source.token_ids(), embedded, workspace);
  }
  if (dense.per_layer_embedding.defined())
    d_per_layer = workspace.take(Slot::d_per_layer, {dh.size(0), dense.per_layer_embedding.size(1)}, compute_dtype());
  for (std::int64_t l = config_.num_layers() - 1; l >= grads.first_layer(); --l) {
    auto a = source.layer(l);
    if (source.holds_input_alone(l)) {
      auto s = scratch(dh.size(0), {workspace});
      s.per_layer = per_layer;
      run_layer(l, positions, history, a, workspace.take(Slot::recomputed, dh.sizes(), dh.scalar_type()), s);
    }
    if (const auto& scalar = layer(l).layer_scalar; scalar.defined()) dh.mul_(scalar);
    if (per_layer_) backward_per_layer(l, a, dh, d_per_layer, grads.layer(l), workspace);
    if (has_mlp(l)) backward_mlp(l, a, dh, history, grads.layer(l), workspace);
    if (has_mixer(l)) backward_mixer(l, a, positions, dh, history, grads, workspace);
    if (layer_done) layer_done(l);
  }
  if (const auto& embedding = dense.embedding; embedding.defined()) {
    if (per_layer_)
      per_layer_->inputs_backward(parameters_, source.token_ids(), source.layer(0).h_in, d_per_layer, dense, dh);
    if (config_.embedding_multiplier != 1) dh.mul_(config_.embedding_multiplier);
    embed_backward(dh, source.token_ids(), embedding);
  }
}

/// Gradient of what a branch's last product returns, in the compute type: that of the residual stream, taken through
/// the branch's norm.
at::Tensor Decoder::branch_gradient(const at::Tensor& dh, const Branch& branch, const at::Tensor& norm,
                                    const at::Tensor& d_norm, Workspace& workspace) const {
  auto d_out = dh;
  if (norm.defined() || config_.residual_multiplier != 1)
    d_out = workspace.take(Slot::d_branch, dh.sizes(), dh.scalar_type());
  if (config_.residual_multiplier != 1) d_out.copy_(dh).mul_(config_.residual_multiplier);
  if (norm.defined())
    ops::rms_norm_backward(config_.residual_multiplier != 1 ? d_out : dh, branch.out, norm, config_.norm_offset,
                           branch.rstd, d_out, /*accumulate=*/false, d_norm);
  if (d_out.scalar_type() == compute_dtype()) return d_out;
  const auto dy = workspace.take(Slot::dy, dh.sizes(), compute_dtype());
  dy.copy_(d_out);
  return dy;
}

/// dh += the gradient that comes back through what a branch read of h; d_normed of every slice is a part of it.
void Decoder::add_input_gradient(const at::Tensor& d_normed, const at::Tensor& h, const at::Tensor& norm,
                                 const at::Tensor& rstd, const at::Tensor& dh, const at::Tensor& d_norm) const {
  if (peers_ != nullptr) peers_->sum(d_normed, "adding the gradients of all slices of a layer");
  if (norm.defined())
    return ops::rms_norm_backward(d_normed, h, norm, config_.norm_offset, rstd, dh, /*accumulate=*/true, d_norm);
  dh.add_(d_normed);
}

void Decoder::backward_per_layer(std::int64_t l, const LayerActivations& a, const at::Tensor& dh,
                                 const at::Tensor& d_inputs, const LayerGradients& grads, Workspace& workspace) {
  const auto &p = layer(l), &g = grads.dense();
  const std::int64_t T = dh.size(0), D = config_.hidden_size;
  const auto dy = branch_gradient(dh, a.per_layer_branch, p.norm_after_per_layer, g.norm_after_per_layer, workspace);
  const auto x = normalised(a.h_per_layer, {}, {}, workspace.take(Slot::normed, {T, D}, compute_dtype())),
             d_x = workspace.take(Slot::d_normed, {T, D}, accumulate_dtype());
  per_layer_->backward(weights(l, {workspace}), l, x, dy, a.per_layer, d_x, d_inputs, grads, workspace);
  dh.add_(d_x);
}

void Decoder::backward_mlp(std::int64_t l, const LayerActivations& a, const at::Tensor& dh, const History& history,
                           const LayerGradients& grads, Workspace& workspace) {
  const auto &p = layer(l), &g = grads.dense();
  const std::int64_t T = dh.size(0), D = config_.hidden_size;
  const auto& h = has_mixer(l) ? a.h_mid : a.h_in;
  const auto dy = branch_gradient(dh, a.mlp_branch, p.norm_after_mlp, g.norm_after_mlp, workspace);
  const auto norm = mlp(l).reads_stream() ? at::Tensor() : p.norm_before_mlp;
  const auto x = [&] {
    if (mlp(l).reads_stream()) return h;
    return normalised(h, norm, {}, workspace.take(Slot::normed, {T, D}, compute_dtype()));
  };
  const auto d_normed = workspace.take(Slot::d_normed, {T, D}, accumulate_dtype());
  mlp(l).backward(weights(l, {workspace}), x, dy, a, d_normed, grads, workspace, history.balance);
  add_input_gradient(d_normed, h, norm, a.rstd_mid, dh, g.norm_before_mlp);
}

void Decoder::backward_mixer(std::int64_t l, const LayerActivations& a, const at::Tensor& positions,
                             const at::Tensor& dh, const History& history, const GradientViews& grads,
                             Workspace& workspace) {
  const auto wanted = grads.layer(l);
  const auto &p = layer(l), &g = wanted.dense();
  const auto w = weights(l, {workspace});
  const std::int64_t T = dh.size(0), D = config_.hidden_size;
  const auto S = compute_dtype();
  const auto dy = branch_gradient(dh, a.attn_branch, p.norm_after_attention, g.norm_after_attention, workspace);
  if (wanted.wants(&LayerParameters::o_weight))
    wanted.add(&LayerParameters::o_weight, dy, mixer(l).result(p, a, workspace), workspace);
  if (g.o_bias.defined()) ops::add_column_sums(dy, g.o_bias);
  const auto d_mixed = workspace.take(Slot::d_attn, {T, mixer(l).columns()}, S);
  w.backward_input(&LayerParameters::o_weight, dy, d_mixed);
  const auto d_product = mixer(l).backward(w, d_mixed, a, wanted, {{positions, {}}, rope(l), history, workspace});
  if (wanted.wants(&LayerParameters::qkv_weight))
    wanted.add(&LayerParameters::qkv_weight, d_product,
               normalised(a.h_in, p.norm_before_attention, {}, workspace.take(Slot::normed, {T, D}, S)), workspace);
  if (g.qkv_bias.defined()) ops::add_column_sums(d_product, g.qkv_bias);
  if (!grads.goes_below(l)) return;
  const auto d_normed = workspace.take(Slot::d_normed, {T, D}, accumulate_dtype());
  w.backward_input(&LayerParameters::qkv_weight, d_product, d_normed);
  add_input_gradient(d_normed, a.h_in, p.norm_before_attention, a.rstd_in, dh, g.norm_before_attention);
}

}  // namespace nemo_rl::model
