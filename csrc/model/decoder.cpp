#include "model/decoder.h"

#include "common/check.h"
#include "model/activations.h"
#include "ops/embedding.h"
#include "ops/index_tensor.h"
#include "ops/linear.h"
#include "ops/rms_norm.h"

namespace nemo_rl::model {
namespace {

/// Whether these are all of T rows, in order.
bool are_all(std::span<const std::int64_t> rows, std::int64_t T) {
  if (static_cast<std::int64_t>(rows.size()) != T) return false;
  for (std::int64_t t = 0; t < T; ++t)
    if (rows[static_cast<std::size_t>(t)] != t) return false;
  return true;
}

}  // namespace

Decoder::Decoder(ModelConfig config, DecoderParameters parameters, distributed::Peers* peers)
    : config_(std::move(config)), parameters_(std::move(parameters)), peers_(peers) {
  for (const auto& rope : config_.ropes) ropes_.emplace_back(rope, device());
  NRL_CHECK_ARG(!config_.output_gate || (config_.qk_norm == QkNorm::head && !config_.qkv_bias && !config_.fused_qkv),
                "gates of attention come with norms of each query head, without biases and fused tensors");
  NRL_CHECK_ARG(!config_.value_norm || (config_.qk_norm == QkNorm::head && !config_.output_gate && !config_.qkv_bias),
                "norms of values come with norms of each query head, without gates and biases");
  if (config_.per_layer_input > 0) per_layer_ = std::make_unique<PerLayerInput>(config_);
  for (std::int64_t l = 0; l < config_.num_layers(); ++l) {
    mixers_.push_back(mixer_of(config_, l)), mlps_.push_back(mlp_of(config_, l));
    const auto& layer = config_.layers[static_cast<std::size_t>(l)];
    if (layer.has_mixer && (layer.is_recurrent || layer.has_own_keys())) last_own_ = l, shares_last_keys_ = false;
    else shares_last_keys_ = shares_last_keys_ || layer.has_mixer;
    NRL_CHECK_ARG(layer.window >= 0 && layer.rope < static_cast<int>(ropes_.size()), "a layer has window ",
                  layer.window, " and rotary table ", layer.rope, " of ", ropes_.size());
    NRL_CHECK_ARG(
        layer.keys_of < static_cast<int>(l) && (config_.value_norm || layer.has_own_keys() || !layer.has_attention()),
        "layer ", l, " cannot read the keys of layer ", layer.keys_of);
    if (layer.rope == LayerConfig::kNoRope) continue;
    const auto turned = 2 * config_.ropes[static_cast<std::size_t>(layer.rope)].inv_freq.size();
    const auto H = attention_heads(l).head_dim;
    NRL_CHECK_ARG(static_cast<std::int64_t>(turned) <= H, "rotary embeddings turn ", turned, " dimensions of heads of ",
                  H);
  }
}

ops::AttentionHeads Decoder::attention_heads(std::int64_t l) const {
  const auto& own = config_.layers[static_cast<std::size_t>(l)];
  return {config_.num_heads,
          own.num_kv_heads > 0 ? own.num_kv_heads : config_.num_kv_heads,
          own.head_dim > 0 ? own.head_dim : config_.head_dim,
          config_.attention_scale,
          own.window,
          config_.attention_softcap,
          layer(l).sinks};
}

/// Positions on the decoder's device, with their angles in the table.
at::Tensor Decoder::on_device(const at::Tensor& positions) {
  if (positions.is_cpu()) reserve_positions(positions.numel() > 0 ? positions.max().item<std::int64_t>() + 1 : 1);
  return positions.to(device());
}

at::Tensor Decoder::forward(const at::Tensor& token_ids, const at::Tensor& positions, const History& history,
                            std::span<const std::int64_t> rows, ActivationSink& sink, Workspace& workspace,
                            const ops::PackedWeights* packed, RowAdapters adapters) {
  const std::int64_t T = token_ids.numel();
  const bool all = are_all(rows, T);
  const auto split = all || sink.keeps()                          ? config_.num_layers()
                     : history.attends_rows || !shares_last_keys_ ? last_own_
                                                                  : config_.num_layers() - 1;
  const auto places = on_device(positions);
  auto h = sink.stream(0);
  embed(token_ids, h);
  auto s = scratch(T, {workspace, packed, adapters});
  if (per_layer_) s.per_layer = per_layer_->inputs(parameters_, token_ids, h, workspace);
  for (std::int64_t l = 0; l < split; ++l) {
    auto a = sink.layer(l);
    a.h_in = h;
    h = sink.stream(l + 1);
    run_layer(l, places, history, a, h, s);
    sink.put(l, a);
  }
  if (split < config_.num_layers()) {
    auto a = sink.layer(split);
    a.h_in = h;
    return forward_rows(split, rows, places, history, a, s);
  }
  LayerActivations behind;
  behind.h_in = h;
  sink.put(config_.num_layers(), behind);
  const auto R = static_cast<std::int64_t>(rows.size());
  return all ? h : h.index_select(0, ops::index_tensor(rows.data(), R, h));
}

/// Layer `first`, of which all rows have keys, values and states, and the layers after it, which have none of their
/// own: the residual stream of the requested rows after the last layer.
at::Tensor Decoder::forward_rows(std::int64_t first, std::span<const std::int64_t> rows, const at::Tensor& positions,
                                 const History& history, LayerActivations& a, const Scratch& s) {
  auto& workspace = s.context.workspace;
  const auto R = static_cast<std::int64_t>(rows.size());
  const auto mixed = run_mixer(first, {positions, {}}, history, a, s);
  const auto h = workspace.take(Slot::rows_h, {R, config_.hidden_size}, accumulate_dtype());
  if (R == 0) return h;
  const auto index = ops::index_tensor(rows.data(), R, h);
  const auto of_rows = [&](const at::Tensor& x, Slot slot) {
    auto y = workspace.take(slot, {R, x.size(1)}, x.scalar_type());
    return at::index_select_out(y, x, 0, index);
  };
  of_rows(a.h_in, Slot::rows_h);
  auto mixed_rows = mixed.defined() ? of_rows(mixed, Slot::rows_attn) : mixed;
  const auto adapters = weights(first, s.context).adapters_of(index);
  auto s_rows = scratch(R, {workspace, s.context.packed, adapters});
  if (per_layer_) s_rows.per_layer = s.per_layer.index_select(0, index);
  const MixerRows of_tokens{positions.index_select(0, index), index, positions.numel()};
  NothingKept nothing(*this, R, workspace);
  for (std::int64_t l = first; l < config_.num_layers(); ++l) {
    if (l > first) a = nothing.layer(l);
    a.h_in = h;
    if (l > first) mixed_rows = run_mixer(l, of_tokens, history, a, s_rows);
    finish_layer(l, mixed_rows, a, h, s_rows);
  }
  return h;
}

Decoder::OwnTokens Decoder::own_tokens(const at::Tensor& token_ids) const {
  const auto rows = config_.vocab_rows();
  const auto ids = token_ids.sub(rows.begin);
  const auto index = at::logical_and(ids.ge(0), ids.lt(rows.size())).nonzero().view(-1);
  return {index, ids.index_select(0, index)};
}

/// h [T, D] = the rows of the embedding, scaled. Of a split one each process has some; the sum with the others' zeros
/// is exact.
void Decoder::embed(const at::Tensor& token_ids, const at::Tensor& h) const {
  if (peers_ == nullptr) {
    ops::embedding_forward(parameters_.embedding, token_ids, h, compute_dtype());
  } else {
    ops::check_token_ids({token_ids.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(token_ids.numel())},
                         config_.vocab_size, "embedding_forward");
    const auto own = own_tokens(token_ids);
    const auto rows = at::empty({own.ids.numel(), h.size(1)}, h.options());
    ops::embedding_forward(parameters_.embedding, own.ids, rows, compute_dtype());
    h.zero_();
    const_cast<at::Tensor&>(h).index_copy_(0, own.index, rows);
    peers_->sum(h, "adding the embeddings of all slices");
  }
  if (config_.embedding_multiplier != 1) h.mul_(config_.embedding_multiplier);
}

void Decoder::embed_backward(const at::Tensor& dh, const at::Tensor& token_ids, const at::Tensor& d_embedding) const {
  if (peers_ == nullptr) return ops::embedding_backward(dh, token_ids, d_embedding);
  const auto own = own_tokens(token_ids);
  ops::embedding_backward(dh.index_select(0, own.index), own.ids, d_embedding);
}

Decoder::Scratch Decoder::scratch(std::int64_t T, const ProductContext& context) const {
  const auto& c = config_;
  const auto S = compute_dtype();
  auto& workspace = context.workspace;
  Scratch s{.normed = workspace.take(Slot::normed, {T, c.hidden_size}, S), .context = context};
  const bool norms = !c.norms.after_attention.empty() || !c.norms.after_mlp.empty();
  if (!norms && peers_ == nullptr && c.residual_multiplier == 1) return s;
  s.branch_out = workspace.take(Slot::branch_out, {T, c.hidden_size}, accumulate_dtype());
  if (norms) s.branch = workspace.take(Slot::branch, {T, c.hidden_size}, S);
  return s;
}

/// a.h_in -> h_out, which may be a.h_in if nothing is kept.
void Decoder::run_layer(std::int64_t l, const at::Tensor& positions, const History& history, LayerActivations& a,
                        const at::Tensor& h_out, const Scratch& s) {
  const auto mixed = run_mixer(l, {positions, {}}, history, a, s);
  finish_layer(l, mixed, a, h_out, s);
}

/// What the layer's output product reads; undefined if the layer has no mixer.
at::Tensor Decoder::run_mixer(std::int64_t l, const MixerRows& rows, const History& history, LayerActivations& a,
                              const Scratch& s) {
  if (!has_mixer(l)) return {};
  const auto w = weights(l, s.context);
  w.ask_ahead(&LayerParameters::qkv_weight);
  const auto x = normalised(a.h_in, layer(l).norm_before_attention, a.rstd_in, s.normed);
  return mixer(l).forward(w, x, a, {rows, rope(l), history, s.context.workspace});
}

const RopeTable* Decoder::rope(std::int64_t l) const {
  const int rope = config_.layers[static_cast<std::size_t>(l)].rope;
  return rope == LayerConfig::kNoRope ? nullptr : &ropes_[static_cast<std::size_t>(rope)];
}

/// y = the norm of x with this weight; rstd may be undefined.
void Decoder::normalise(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& y,
                        const at::Tensor& rstd) const {
  ops::rms_norm_forward(x, weight, config_.rms_norm_eps, config_.norm_offset, y, if_defined(rstd));
}

/// h += what product(y, accumulate) gives, or the norm of that where the architecture has one, times
/// residual_multiplier. The tensor-parallel sum over ranks stands between the product and the addition; where there is
/// neither a norm nor such a sum nor a factor, the product adds by itself.
template <class Product>
void Decoder::add_branch(const Product& product, const at::Tensor& norm, const Branch& branch, const at::Tensor& h,
                         const Scratch& s) const {
  const double factor = config_.residual_multiplier;
  if (!norm.defined() && peers_ == nullptr && factor == 1) return product(h, /*accumulate=*/true);
  const auto& out = branch.out.defined() ? branch.out : s.branch_out;
  product(out, /*accumulate=*/false);
  if (peers_ != nullptr) peers_->sum(out, "adding what all slices of a layer give");
  if (norm.defined()) normalise(out, norm, s.branch, branch.rstd);
  const auto& added = norm.defined() ? s.branch : out;
  if (factor != 1) added.mul_(factor);
  h.add_(added);
}

/// The output product of `mixed`, the MLP and per-layer inputs: what they add to the residual stream.
void Decoder::finish_layer(std::int64_t l, const at::Tensor& mixed, LayerActivations& a, const at::Tensor& h_out,
                           const Scratch& s) {
  const auto& p = layer(l);
  const auto w = weights(l, s.context);
  const auto& h = a.h_mid.defined() ? a.h_mid : has_mlp(l) ? a.h_in : h_out;
  if (!h.is_same(a.h_in)) h.copy_(a.h_in);
  if (has_mixer(l)) {
    // of several slices the first adds the bias
    const auto o_bias = config_.slice.rank == 0 ? p.o_bias : at::Tensor();
    add_branch([&](const at::Tensor& y,
                   bool accumulate) { w.forward(&LayerParameters::o_weight, mixed, o_bias, y, accumulate); },
               p.norm_after_attention, a.attn_branch, h, s);
  }
  if (!has_mlp(l)) return;
  auto& workspace = s.context.workspace;
  mlp(l).ask_ahead(w);
  const auto x = mlp(l).reads_stream() ? h : normalised(h, p.norm_before_mlp, a.rstd_mid, s.normed);
  if (!h_out.is_same(h)) h_out.copy_(h);
  add_branch([&](const at::Tensor& y, bool accumulate) { mlp(l).forward(w, x, y, accumulate, a, workspace); },
             p.norm_after_mlp, a.mlp_branch, h_out, s);
  if (per_layer_) {
    if (a.h_per_layer.defined()) a.h_per_layer.copy_(h_out);
    const auto stream = normalised(h_out, {}, {}, s.normed);
    add_branch(
        [&](const at::Tensor& y, bool accumulate) {
          per_layer_->forward(w, l, stream, s.per_layer, a.per_layer, y, accumulate, workspace);
        },
        p.norm_after_per_layer, a.per_layer_branch, h_out, s);
  }
  if (p.layer_scalar.defined()) h_out.mul_(p.layer_scalar);
}

/// What a branch reads: h normalised into `out`, or h itself where no norm stands before it; in the compute type.
at::Tensor Decoder::normalised(const at::Tensor& h, const at::Tensor& weight, const at::Tensor& rstd,
                               const at::Tensor& out) const {
  if (weight.defined()) {
    normalise(h, weight, out, rstd);
    return out;
  }
  return h.scalar_type() == out.scalar_type() ? h : const_cast<at::Tensor&>(out).copy_(h);
}

void Decoder::final_norm(const at::Tensor& h, const at::Tensor& y, const at::Tensor& rstd) const {
  normalise(h, parameters_.final_norm, y, rstd);
  if (config_.logit_multiplier != 1) y.mul_(config_.logit_multiplier);
}

void Decoder::final_norm_backward(const at::Tensor& dy, const at::Tensor& h, const at::Tensor& rstd,
                                  const at::Tensor& dh, const at::Tensor& d_norm) const {
  if (config_.logit_multiplier != 1) dy.mul_(config_.logit_multiplier);
  ops::rms_norm_backward(dy, h, parameters_.final_norm, config_.norm_offset, rstd, dh, /*accumulate=*/false, d_norm);
}

}  // namespace nemo_rl::model
