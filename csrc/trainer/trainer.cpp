#include "trainer/trainer.h"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/check.h"
#include "ops/linear.h"
#include "ops/sampling.h"
#include "runtime/large_tensor.h"
#include "runtime/tensor.h"

namespace nemo_rl::trainer {
namespace {

/// `sequences` must outlive the result.
model::Attention attention_over(const std::vector<ops::AttentionSequence>& sequences,
                                const ops::AttentionHeads& heads) {
  return [&sequences, heads](std::int64_t, const at::Tensor& qkv, at::Tensor& o, at::Tensor& lse) {
    ops::attention_forward(qkv, sequences, heads, o, lse);
  };
}

/// `pairs` may lie on another device where they are only read.
template <class F>
void for_each_pair(const PackedBatch& packed, const at::Tensor& whole, const at::Tensor& pairs_anywhere, F&& f) {
  const at::Tensor pairs = pairs_anywhere.cpu();
  AT_DISPATCH_FLOATING_TYPES(pairs.scalar_type(), "for_each_pair", [&] {
    auto* full = whole.data_ptr<scalar_t>();
    auto* flat = pairs.data_ptr<scalar_t>();
    for (std::size_t i = 0; i < packed.places.size(); ++i) f(full[packed.places[i]], flat[i]);
  });
}

std::vector<std::int64_t> all_rows(std::int64_t T) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(T));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

constexpr auto to_batch = [](auto& full, auto& pair) { full = pair; };

void check_result(const at::Tensor& out, const RowBatch& batch, at::ScalarType dtype) {
  NRL_CHECK_ARG(
      out.is_contiguous() && out.sizes() == batch.token_ids.sizes() && out.scalar_type() == dtype && out.is_cpu(),
      "the results need a contiguous ", c10::toString(dtype), " CPU tensor of shape ", batch.token_ids.sizes());
}

}  // namespace

Trainer::Trainer(std::shared_ptr<model::DecoderModel> model, std::shared_ptr<distributed::Communicator> ranks)
    : model_(std::move(model)), ranks_(std::move(ranks)), head_(model::VocabSlice(model_->config(), model_->peers())) {
  NRL_CHECK_ARG(ranks_ == nullptr || model_->device().is_cpu(),
                "several processes train one model on the CPU only, not on ", model_->device().str());
  if (ranks_ != nullptr) model_->keep_master_shard(shard().begin, shard().end);
}

void Trainer::forward_body(const RowBatch& batch, const std::vector<std::int64_t>& samples,
                           const ForwardOptions& options) {
  auto& decoder = model_->decoder();
  packed_ = pack_batch(batch, samples, options.share_prefix);
  pending_ = options.keep;
  const auto attention = attention_over(packed_.sequences, decoder.attention_heads());
  auto& wanted = packed_.query.rows;
  auto& workspace = model_->workspace();
  activations_.reset();
  if (auto nodes = options.keep ? kept_nodes() : std::vector<model::KeptActivations::Node>(); !nodes.empty()) {
    reused_tokens_ += static_cast<std::int64_t>(nodes.size());
    auto source = std::make_unique<model::KeptSource>(decoder, model_->kept(), std::move(nodes), packed_.token_ids,
                                                      packed_.positions, workspace);
    h_ = source->stream_behind();
    activations_ = std::move(source);
  } else if (options.keep) {
    auto saved = std::make_unique<model::SavedActivations>(decoder, packed_.token_ids, packed_.positions,
                                                           options.checkpoint, workspace);
    h_ = decoder.forward(packed_.token_ids, packed_.positions, attention, all_rows(packed_.token_ids.numel()), *saved,
                         workspace);
    activations_ = std::move(saved);
  } else {
    model::NothingKept nothing(decoder, packed_.token_ids.numel(), workspace);
    h_ = decoder.forward(packed_.token_ids, packed_.positions, attention, wanted, nothing, workspace);
    std::iota(wanted.begin(), wanted.end(), 0);  // h_ holds these rows alone
  }
}

/// Where generation left the rows of packed_; empty unless all are there.
std::vector<model::KeptActivations::Node> Trainer::kept_nodes() const {
  using model::KeptActivations;
  const auto& kept = model_->kept();
  if (kept.empty()) return {};
  const auto* ids = packed_.token_ids.const_data_ptr<std::int64_t>();
  std::vector<KeptActivations::Node> nodes(static_cast<std::size_t>(packed_.token_ids.numel()), KeptActivations::kNone);
  for (const auto& s : packed_.sequences) {
    auto node = s.prefix_length > 0 ? nodes[static_cast<std::size_t>(s.prefix_start + s.prefix_length - 1)]
                                    : KeptActivations::kRoot;
    for (std::int64_t row = s.start; row < s.start + s.length; ++row) {
      node = kept.find(node, ids[row]);
      if (node == KeptActivations::kNone) return {};
      nodes[static_cast<std::size_t>(row)] = node;
    }
  }
  return nodes;
}

void Trainer::forward(const RowBatch& batch, const std::vector<std::int64_t>& samples,
                      const model::TokenScoring& scoring, const ForwardOptions& options, const at::Tensor& out,
                      const at::Tensor& unfiltered) {
  auto& decoder = model_->decoder();
  check_result(out, batch, decoder.accumulate_dtype());
  if (unfiltered.defined()) check_result(unfiltered, batch, decoder.accumulate_dtype());
  ops::check_rule({static_cast<float>(scoring.temperature), scoring.top_p, scoring.top_k, false});
  NRL_CHECK_ARG(
      !values() || (scoring.temperature == 1 && !scoring.filters(decoder.config().vocab_size) && !unfiltered.defined()),
      "a value model has no temperature, top_p, top_k and unfiltered log-probabilities");
  scoring_ = scoring;
  has_unfiltered_ = unfiltered.defined();
  head_done_ = false;
  forward_body(batch, samples, options);
  auto& workspace = model_->workspace();
  const auto pairs = values() ? model::PairValues{value_head_.forward(decoder, h_, packed_.query, workspace), {}}
                              : head_.forward(decoder, h_, packed_.query, scoring, has_unfiltered_, workspace);
  for_each_pair(packed_, out, pairs.logprobs, to_batch);
  if (has_unfiltered_)
    for_each_pair(packed_, unfiltered, pairs.unfiltered.defined() ? pairs.unfiltered : pairs.logprobs, to_batch);
}

bool Trainer::takes_token_loss(const model::TokenScoring& scoring) const {
  const auto& decoder = model_->decoder();
  return !values() && !scoring.filters(decoder.config().vocab_size) && decoder.accumulate_dtype() == at::kFloat;
}

void Trainer::forward(const RowBatch& batch, const std::vector<std::int64_t>& samples,
                      const model::TokenScoring& scoring, const ForwardOptions& options, const at::Tensor& out,
                      const TokenLoss& loss) {
  auto& decoder = model_->decoder();
  check_result(out, batch, decoder.accumulate_dtype());
  ops::check_rule({static_cast<float>(scoring.temperature), scoring.top_p, scoring.top_k, false});
  NRL_CHECK_ARG(
      takes_token_loss(scoring) && options.keep && model_->trainable() && loss.inputs.advantages.numel() == out.numel(),
      "a forward with a loss is for training a float32 or bfloat16 policy without top_p and top_k, on tensors ",
      out.sizes());
  scoring_ = scoring;
  has_unfiltered_ = false;
  head_done_ = true;
  grads();
  forward_body(batch, samples, options);
  const auto logprobs = head_.forward_backward(
      decoder, h_, packed_.query, scoring, loss.at(packed_.places, packed_.samples), *grad_views_, model_->workspace());
  for_each_pair(packed_, out, logprobs, to_batch);
}

at::Tensor Trainer::logits(const at::Tensor& token_ids) {
  NRL_CHECK_ARG(
      token_ids.is_cpu() && token_ids.dim() == 1 && token_ids.scalar_type() == at::kLong && token_ids.numel() > 0,
      "token_ids must be int64 [T], T >= 1, got ", token_ids.sizes());
  auto& decoder = model_->decoder();
  const std::int64_t T = token_ids.numel();
  const std::vector<ops::AttentionSequence> whole{{0, T, 0, 0}};
  const auto attention = attention_over(whole, decoder.attention_heads());
  model::NothingKept nothing(decoder, T, model_->workspace());
  const auto h =
      decoder.forward(token_ids, at::arange(T, at::kLong), attention, all_rows(T), nothing, model_->workspace());
  const auto normed = at::empty(h.sizes(), h.options().dtype(decoder.compute_dtype()));
  decoder.final_norm(h, normed, at::Tensor());
  auto logits = at::empty({T, decoder.parameters().lm_head.size(0)}, h.options());
  ops::linear_forward(normed, decoder.parameters().lm_head, std::nullopt, logits);
  if (model_->peers() == nullptr || values()) return logits;
  auto all = at::empty({T, model_->config().vocab_size}, h.options());
  model::VocabSlice(model_->config(), model_->peers()).gather_rows(logits, all);
  return all;
}

void Trainer::backward(const at::Tensor& d_out, const at::Tensor& d_unfiltered) {
  NRL_CHECK(pending_ && !head_done_,
            "backward from a gradient needs a forward that keeps its activations and has no loss of its own");
  NRL_CHECK_ARG(model_->trainable(), "this model is frozen: it was built without gradients");
  NRL_CHECK_ARG(!d_unfiltered.defined() || has_unfiltered_,
                "a gradient of unfiltered log-probabilities that the forward was not asked for");
  pending_ = false;
  grads();
  auto& decoder = model_->decoder();
  auto& workspace = model_->workspace();
  const auto pairs_of = [&](const at::Tensor& whole) {
    const auto pairs = at::empty({static_cast<std::int64_t>(packed_.places.size())}, h_.options().device(at::kCPU));
    for_each_pair(packed_, whole, pairs, [](auto& full, auto& pair) { pair = full; });
    return pairs.to(h_.device());
  };
  model::PairValues d_values{pairs_of(d_out), d_unfiltered.defined() ? pairs_of(d_unfiltered) : at::Tensor()};
  if (d_values.unfiltered.defined() && !scoring_.filters(decoder.config().vocab_size))
    d_values.logprobs += d_values.unfiltered;
  const auto dh = values()
                      ? value_head_.backward(decoder, h_, packed_.query, d_values.logprobs, *grad_views_, workspace)
                      : head_.backward(decoder, h_, packed_.query, d_values, scoring_, *grad_views_, workspace);
  backward_body(dh);
}

void Trainer::backward() {
  NRL_CHECK(pending_ && head_done_, "backward without a gradient needs a forward with a loss");
  pending_ = false;
  backward_body(head_.finish_backward(model_->decoder(), h_, packed_.query, *grad_views_, model_->workspace()));
}

void Trainer::backward_body(const at::Tensor& dh) {
  auto& decoder = model_->decoder();
  const auto heads = decoder.attention_heads();
  const auto attention = attention_over(packed_.sequences, heads);
  const model::AttentionBackward attention_backward =
      [&](const at::Tensor& qkv, const at::Tensor& o, const at::Tensor& d_o, const at::Tensor& lse, at::Tensor& d_qkv) {
        ops::attention_backward(qkv, o, d_o, lse, packed_.sequences, heads, d_qkv);
      };
  NRL_CHECK(activations_ != nullptr, "backward without a forward that keeps its activations");
  decoder.backward(*activations_, dh, attention, attention_backward, *grad_views_, model_->workspace());
  activations_.reset();
}

distributed::Shard Trainer::shard() const {
  const auto total = model_->layout().total;
  return ranks_ == nullptr ? distributed::Shard{0, total}
                           : distributed::shard_of(total, ranks_->rank(), ranks_->size(), ops::kFlatBlock);
}

const at::Tensor& Trainer::grads() {
  if (!grads_.defined()) use_grads(runtime::zeros_large({model_->layout().total}, model_->masters().options()));
  return grads_;
}

void Trainer::use_grads(at::Tensor grads) {
  grads_ = std::move(grads);
  grad_views_.emplace(model_->config(), model_->layout(), grads_);
}

const at::Tensor& Trainer::exp_avg() {
  if (!exp_avg_.defined()) exp_avg_ = runtime::zeros_large({shard().size()}, model_->masters().options());
  return exp_avg_;
}

const at::Tensor& Trainer::exp_avg_sq() {
  if (!exp_avg_sq_.defined()) exp_avg_sq_ = runtime::zeros_large({shard().size()}, model_->masters().options());
  return exp_avg_sq_;
}

void Trainer::zero_grad() {
  blocks_.clear();
  runtime::clear(grads());
}

/// Sums the gradients of what every slice has, but each slice uses for its own heads alone: the norms of queries and
/// keys. Those of the other repeated parameters are the same on all slices already.
void Trainer::add_shared_gradients() {
  auto* const peers = model_->peers();
  if (peers == nullptr || model_->config().qk_norm != model::QkNorm::head) return;
  grads();
  std::vector<at::Tensor> parts;
  for (const auto& layer : grad_views_->layers) parts.insert(parts.end(), {layer.q_norm, layer.k_norm});
  const auto all = at::cat(parts);
  peers->sum(all, "adding the gradients of the norms of all heads");
  std::int64_t at = 0;
  for (auto& part : parts) part.copy_(all.narrow(0, at, part.numel())), at += part.numel();
}

void Trainer::end_block() {
  add_shared_gradients();
  blocks_.add(grads());
  if (auto spare = blocks_.spare(); spare.defined()) {
    runtime::clear(spare);
    use_grads(std::move(spare));
  } else {
    grads_ = at::Tensor();
    grads();
  }
}

/// Makes grads() the sum of all blocks, in this rank's shard of all ranks' blocks.
void Trainer::add_blocks() {
  if (blocks_.count() > 0) {
    blocks_.give_back(grads_);  // of a block that has not begun
    use_grads(blocks_.take());
  } else {
    add_shared_gradients();
  }
  if (ranks_ != nullptr)
    distributed::reduce_scatter(*ranks_, grads(), ops::kFlatBlock, "adding the gradients of all ranks");
}

double Trainer::grad_norm() const { return grads_.defined() ? ops::l2_norm(grads_) : 0.0; }

bool Trainer::grads_are_finite() {
  const bool own = std::isfinite(grads().sum(at::kDouble).item<double>());  // infinities and NaN survive a sum
  if (model_->peers() == nullptr) return own;
  return model_->peers()->gather(at::full({1}, own ? 1 : 0, at::kInt), "looking for a gradient").all().item<bool>();
}

/// Of the whole gradient, of which each rank has its shard, and each peer its slice. What all slices repeat counts
/// once.
double Trainer::whole_norm() {
  auto* const peers = model_->peers();
  if (peers == nullptr) return slice_norm();
  std::vector<at::Tensor> repeated;
  if (peers->rank() > 0)
    for (const auto& spec : model_->layout().specs)
      if (spec.split == model::ParameterSpec::kWhole) repeated.push_back(grads_.narrow(0, spec.offset, spec.numel));
  std::vector<at::Tensor> copies;
  for (auto& part : repeated) copies.push_back(part.clone()), part.zero_();
  const double norm = slice_norm();
  for (std::size_t i = 0; i < repeated.size(); ++i) repeated[i].copy_(copies[i]);
  const auto squares = peers->gather(at::full({1}, norm * norm, at::kDouble), "the gradient norm of all slices");
  return ops::norm_of_blocks(squares.view(-1));
}

/// Of this slice: as l2_norm of it, to the bit.
double Trainer::slice_norm() {
  if (ranks_ == nullptr) return grad_norm();
  const auto own = ops::block_squares(grads_.narrow(0, shard().begin, shard().size()));
  const auto blocks = (model_->layout().total + ops::kFlatBlock - 1) / ops::kFlatBlock;
  const auto all = at::zeros({blocks}, at::kDouble);
  all.narrow(0, (shard().begin + ops::kFlatBlock - 1) / ops::kFlatBlock, own.numel()).copy_(own);
  distributed::all_gather_shards(*ranks_, all, /*block=*/1, "the gradient norm");
  return ops::norm_of_blocks(all);
}

OptimizerStep Trainer::step(const ops::AdamWSettings& settings, double max_grad_norm) {
  OptimizerStep result;
  grads();
  add_blocks();
  result.grad_norm = whole_norm();
  result.finite = std::isfinite(result.grad_norm);
  if (!result.finite) return result;
  // torch.nn.utils.clip_grad_norm_'s rule
  const double scale = max_grad_norm > 0 ? std::min(1.0, max_grad_norm / (result.grad_norm + 1e-6)) : 1.0;
  ++optimizer_steps_;
  update(settings, scale);
  model_->weights_changed();
  return result;
}

/// AdamW on this rank's shard; then every rank has all new weights.
void Trainer::update(const ops::AdamWSettings& settings, double scale) {
  const auto own = [shard = shard()](const at::Tensor& flat) { return flat.narrow(0, shard.begin, shard.size()); };
  const auto masters = model_->masters().numel() == shard().size() ? model_->masters() : own(model_->masters());
  const auto compute =
      model_->has_separate_masters() ? std::optional<at::Tensor>(own(model_->compute())) : std::nullopt;
  ops::adamw_step(masters, own(grads_), exp_avg(), exp_avg_sq(), compute, settings, optimizer_steps_, scale);
  if (ranks_ != nullptr)
    distributed::all_gather_shards(*ranks_, model_->compute(), ops::kFlatBlock, "the new weights of all ranks");
}

}  // namespace nemo_rl::trainer
