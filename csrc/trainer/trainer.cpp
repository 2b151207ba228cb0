#include "trainer/trainer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "common/check.h"
#include "ops/linear.h"
#include "ops/sampling.h"

namespace nemo_rl::trainer {
namespace {

ops::AttentionHeads heads_of(const model::ModelConfig& c) {
  return {c.num_heads, c.num_kv_heads, c.head_dim, 1.0 / std::sqrt(static_cast<double>(c.head_dim))};
}

template <class F>
void for_each_pair(const PackedBatch& packed, const at::Tensor& padded, const at::Tensor& pairs, F&& f) {
  AT_DISPATCH_FLOATING_TYPES(pairs.scalar_type(), "for_each_pair", [&] {
    auto* full = padded.data_ptr<scalar_t>();
    auto* flat = pairs.data_ptr<scalar_t>();
    for (std::size_t i = 0; i < packed.places.size(); ++i) f(full[packed.places[i]], flat[i]);
  });
}

}  // namespace

Trainer::Trainer(std::shared_ptr<model::DecoderModel> model) : model_(std::move(model)) {}

void Trainer::forward(const PaddedBatch& batch, const std::vector<std::int64_t>& samples, const model::TokenScoring& scoring,
                      const ForwardOptions& options, const at::Tensor& out, const at::Tensor& unfiltered) {
  auto& decoder = model_->decoder();
  for (const auto& t : {out, unfiltered.defined() ? unfiltered : out})
    NRL_CHECK_ARG(t.is_contiguous() && t.sizes() == batch.input_ids.sizes() && t.scalar_type() == decoder.accumulate_dtype(),
                  "the results need a contiguous ", c10::toString(decoder.accumulate_dtype()), " tensor of shape ", batch.input_ids.sizes());
  ops::check_rule({static_cast<float>(scoring.temperature), scoring.top_p, scoring.top_k, false});
  NRL_CHECK_ARG(!values() || (scoring.temperature == 1 && !scoring.filters(decoder.config().vocab_size) && !unfiltered.defined()),
                "a value model has no temperature, top_p, top_k and unfiltered log-probabilities");
  packed_ = pack_batch(batch, samples, options.share_prefix);
  scoring_ = scoring;
  pending_ = options.keep;
  has_unfiltered_ = unfiltered.defined();
  const auto heads = heads_of(decoder.config());
  const model::Attention attention = [&](std::int64_t, const at::Tensor& qkv, at::Tensor& o, at::Tensor& lse) {
    ops::attention_forward(qkv, packed_.sequences, heads, o, lse);
  };
  auto& workspace = model_->workspace();
  h_ = options.keep ? decoder.forward_train(packed_.token_ids, packed_.positions, attention, options.checkpoint, workspace)
                    : decoder.forward(packed_.token_ids, packed_.positions, attention, workspace);
  const auto pairs = values() ? model::PairValues{value_head_.forward(decoder, h_, packed_.query, workspace), {}}
                              : head_.forward(decoder, h_, packed_.query, scoring, has_unfiltered_, workspace);
  const auto write = [](auto& full, auto& pair) { full = pair; };
  for_each_pair(packed_, out, pairs.logprobs, write);
  if (has_unfiltered_) for_each_pair(packed_, unfiltered, pairs.unfiltered.defined() ? pairs.unfiltered : pairs.logprobs, write);
}

at::Tensor Trainer::logits(const at::Tensor& token_ids) {
  NRL_CHECK_ARG(token_ids.dim() == 1 && token_ids.scalar_type() == at::kLong && token_ids.numel() > 0, "token_ids must be int64 [T], T >= 1, got ",
                token_ids.sizes());
  auto& decoder = model_->decoder();
  const std::int64_t T = token_ids.numel();
  const std::vector<ops::AttentionSequence> whole{{0, T, 0, 0}};
  const model::Attention attention = [&](std::int64_t, const at::Tensor& qkv, at::Tensor& o, at::Tensor& lse) {
    ops::attention_forward(qkv, whole, heads_of(decoder.config()), o, lse);
  };
  const auto h = decoder.forward(token_ids, at::arange(T, at::kLong), attention, model_->workspace());
  const auto normed = at::empty(h.sizes(), h.options().dtype(decoder.compute_dtype()));
  decoder.final_norm(h, normed, at::Tensor());
  auto logits = at::empty({T, decoder.parameters().lm_head.size(0)}, h.options());
  ops::linear_forward(normed, decoder.parameters().lm_head, std::nullopt, logits);
  return logits;
}

void Trainer::backward(const at::Tensor& d_out, const at::Tensor& d_unfiltered) {
  NRL_CHECK(pending_, "backward without a forward that keeps its activations");
  NRL_CHECK_ARG(model_->trainable(), "this model is frozen: it was built without gradients");
  NRL_CHECK_ARG(!d_unfiltered.defined() || has_unfiltered_, "a gradient of unfiltered log-probabilities that the forward was not asked for");
  pending_ = false;
  grads();
  auto& decoder = model_->decoder();
  auto& workspace = model_->workspace();
  const auto pairs_of = [&](const at::Tensor& padded) {
    const auto pairs = at::empty({static_cast<std::int64_t>(packed_.places.size())}, h_.options());
    for_each_pair(packed_, padded, pairs, [](auto& full, auto& pair) { pair = full; });
    return pairs;
  };
  model::PairValues d_values{pairs_of(d_out), d_unfiltered.defined() ? pairs_of(d_unfiltered) : at::Tensor()};
  if (d_values.unfiltered.defined() && !scoring_.filters(decoder.config().vocab_size)) d_values.logprobs += d_values.unfiltered;
  const auto dh = values() ? value_head_.backward(decoder, h_, packed_.query, d_values.logprobs, *grad_views_, workspace)
                           : head_.backward(decoder, h_, packed_.query, d_values, scoring_, *grad_views_, workspace);
  const auto heads = heads_of(decoder.config());
  const model::Attention attention = [&](std::int64_t, const at::Tensor& qkv, at::Tensor& o, at::Tensor& lse) {
    ops::attention_forward(qkv, packed_.sequences, heads, o, lse);
  };
  const model::AttentionBackward attention_backward = [&](const at::Tensor& qkv, const at::Tensor& o, const at::Tensor& d_o, const at::Tensor& lse,
                                                          at::Tensor& d_qkv) {
    ops::attention_backward(qkv, o, d_o, lse, packed_.sequences, heads, d_qkv);
  };
  decoder.backward(dh, attention, attention_backward, *grad_views_, workspace);
}

const at::Tensor& Trainer::grads() {
  if (!grads_.defined()) {
    grads_ = at::zeros_like(model_->masters());
    grad_views_.emplace(model_->config(), model_->layout(), grads_);
  }
  return grads_;
}

const at::Tensor& Trainer::exp_avg() {
  if (!exp_avg_.defined()) exp_avg_ = at::zeros_like(model_->masters());
  return exp_avg_;
}

const at::Tensor& Trainer::exp_avg_sq() {
  if (!exp_avg_sq_.defined()) exp_avg_sq_ = at::zeros_like(model_->masters());
  return exp_avg_sq_;
}

void Trainer::zero_grad() { const_cast<at::Tensor&>(grads()).zero_(); }

double Trainer::grad_norm() const { return grads_.defined() ? ops::l2_norm(grads_) : 0.0; }

OptimizerStep Trainer::step(const ops::AdamWSettings& settings, double max_grad_norm) {
  OptimizerStep result;
  grads();
  result.grad_norm = grad_norm();
  result.finite = std::isfinite(result.grad_norm);
  if (!result.finite) return result;
  // torch.nn.utils.clip_grad_norm_'s rule
  const double scale = max_grad_norm > 0 ? std::min(1.0, max_grad_norm / (result.grad_norm + 1e-6)) : 1.0;
  ++optimizer_steps_;
  const auto compute = model_->has_separate_masters() ? std::optional<at::Tensor>(model_->compute()) : std::nullopt;
  ops::adamw_step(model_->masters(), grads_, exp_avg(), exp_avg_sq(), compute, settings, optimizer_steps_, scale);
  return result;
}

}  // namespace nemo_rl::trainer
