#include "trainer/trainer.h"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "common/check.h"
#include "ops/linear.h"
#include "ops/sampling.h"
#include "runtime/large_tensor.h"
#include "runtime/tensor.h"

namespace nemo_rl::trainer {
namespace {

/// `sequences` and `decoder` must outlive the result.
model::History history_of(const std::vector<ops::AttentionSequence>& sequences, const model::Decoder& decoder) {
  model::History history;
  history.attention = [&](std::int64_t layer, const at::Tensor& qkv, at::Tensor& o, at::Tensor& lse) {
    ops::attention_forward(qkv, sequences, decoder.attention_heads(layer), o, lse);
  };
  history.attention_backward = [&](std::int64_t layer, const at::Tensor& qkv, const at::Tensor& o,
                                   const at::Tensor& d_o, const at::Tensor& lse, at::Tensor& d_qkv) {
    ops::attention_backward(qkv, o, d_o, lse, sequences, decoder.attention_heads(layer), d_qkv);
  };
  if (decoder.config().has_recurrent()) history.sequences = ops::recurrent_sequences(sequences);
  return history;
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

void check_result(const at::Tensor& out, at::IntArrayRef sizes, at::ScalarType dtype) {
  NRL_CHECK_ARG(out.is_contiguous() && out.sizes() == sizes && out.scalar_type() == dtype && out.is_cpu(),
                "the results need a contiguous ", c10::toString(dtype), " CPU tensor of shape ", sizes);
}

}  // namespace

Trainer::Trainer(std::shared_ptr<model::DecoderModel> model, TrainedTogether together, StateTypes state)
    : model_(std::move(model)),
      gradients_(*model_, std::move(together)),
      state_(state),
      head_(model::VocabSlice(model_->config(), model_->peers())) {
  if (state_.store_param_remainders) model_->split_masters();
  if (gradients_.shards() != nullptr) model_->keep_master_shard(shard().begin, shard().end);
}

void Trainer::forward_body(const RowBatch& batch, const std::vector<std::int64_t>& samples,
                           const ForwardOptions& options) {
  auto& decoder = model_->decoder();
  packed_ = pack_batch(batch, samples, options.share_prefix);
  targets_ = batch.targets.defined() ? batch.targets.size(1) : 1;
  pending_ = options.keep;
  const auto history = history_of(packed_.sequences, decoder);
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
    h_ = decoder.forward(packed_.token_ids, packed_.positions, history, all_rows(packed_.token_ids.numel()), *saved,
                         workspace);
    activations_ = std::move(saved);
  } else {
    model::NothingKept nothing(decoder, packed_.token_ids.numel(), workspace);
    h_ = decoder.forward(packed_.token_ids, packed_.positions, history, wanted, nothing, workspace);
    std::iota(wanted.begin(), wanted.end(), 0);  // h_ holds these rows alone
  }
}

void Trainer::move_kept(const RowBatch& batch, const std::vector<KeptMove>& moves) {
  if (auto* const ranks = gradients_.shards()) trainer::move_kept(*ranks, model_->kept(), batch, moves);
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
                      const model::TokenScoring& scoring, const ForwardOptions& options, const TokenOutputs& outputs) {
  auto& decoder = model_->decoder();
  const bool filters = scoring.filters(decoder.config().vocab_size);
  const auto scored = batch.targets.defined() ? batch.targets.sizes() : batch.token_ids.sizes();
  check_result(outputs.out, scored, decoder.accumulate_dtype());
  if (outputs.unfiltered.defined()) check_result(outputs.unfiltered, scored, decoder.accumulate_dtype());
  if (outputs.entropy.defined()) check_result(outputs.entropy, batch.token_ids.sizes(), decoder.accumulate_dtype());
  ops::check_rule({static_cast<float>(scoring.temperature), scoring.top_p, scoring.top_k, false});
  NRL_CHECK_ARG(!values() || (scoring.temperature == 1 && !filters && !outputs.unfiltered.defined() &&
                              !outputs.entropy.defined() && !batch.targets.defined()),
                "a value model has no temperature, top_p, top_k, entropy and log-probabilities");
  scoring_ = scoring;
  has_unfiltered_ = outputs.unfiltered.defined();
  has_entropy_ = outputs.entropy.defined();
  head_done_ = false;
  forward_body(batch, samples, options);
  auto& workspace = model_->workspace();
  if (values())
    return for_each_pair(packed_, outputs.out, value_head_.forward(decoder, h_, packed_.query, workspace), to_batch);
  const auto entropy = has_entropy_ ? at::empty({packed_.rows()}, h_.options()) : at::Tensor();
  const auto pairs = head_.forward(decoder, h_, packed_.query, scoring, has_unfiltered_, entropy, workspace);
  for_each_pair(packed_, outputs.out, pairs.logprobs, to_batch);
  if (has_unfiltered_)
    for_each_pair(packed_, outputs.unfiltered, pairs.unfiltered.defined() ? pairs.unfiltered : pairs.logprobs,
                  to_batch);
  if (has_entropy_)
    outputs.entropy.view({-1}).index_copy_(0, token_places(), entropy.cpu().index_select(0, token_rows()));
}

/// The row of the query that each wanted token belongs to, int64 [wanted tokens].
at::Tensor Trainer::token_rows() const {
  const auto rows = at::empty({static_cast<std::int64_t>(packed_.places.size()) / targets_}, at::kLong);
  for (std::int64_t i = 0; i < rows.numel(); ++i)
    rows.data_ptr<std::int64_t>()[i] = packed_.query.pair_row[static_cast<std::size_t>(i * targets_)];
  return rows;
}

/// The element of the batch's token_ids that each wanted token is, int64 [wanted tokens].
at::Tensor Trainer::token_places() const {
  const auto index = at::empty({static_cast<std::int64_t>(packed_.places.size()) / targets_}, at::kLong);
  for (std::int64_t i = 0; i < index.numel(); ++i)
    index.data_ptr<std::int64_t>()[i] = packed_.places[static_cast<std::size_t>(i * targets_)] / targets_;
  return index;
}

void Trainer::likeliest(const RowBatch& batch, const std::vector<std::int64_t>& samples, double temperature,
                        bool share_prefix, const at::Tensor& ids, const at::Tensor& logprobs) {
  auto& decoder = model_->decoder();
  NRL_CHECK_ARG(!values(), "the likeliest tokens need a language model");
  NRL_CHECK_ARG(ids.dim() == 2 && ids.scalar_type() == at::kLong && ids.size(0) == batch.token_ids.numel() &&
                    !batch.targets.defined(),
                "ids: expected int64 [", batch.token_ids.numel(), ", k], and a batch without targets");
  check_result(logprobs, ids.sizes(), decoder.accumulate_dtype());
  forward_body(batch, samples, {share_prefix, false, false});
  const auto rows_ids = at::empty({packed_.rows(), ids.size(1)}, at::kLong);
  const auto rows_logprobs = at::empty(rows_ids.sizes(), logprobs.options());
  head_.likeliest(decoder, h_, packed_.query, temperature, rows_ids, rows_logprobs, model_->workspace());
  ids.index_copy_(0, token_places(), rows_ids.index_select(0, token_rows()));
  logprobs.index_copy_(0, token_places(), rows_logprobs.index_select(0, token_rows()));
}

bool Trainer::takes_token_loss(const model::TokenScoring& scoring) const {
  const auto& decoder = model_->decoder();
  return !values() && !scoring.filters(decoder.config().vocab_size) && decoder.accumulate_dtype() == at::kFloat;
}

void Trainer::forward(const RowBatch& batch, const std::vector<std::int64_t>& samples,
                      const model::TokenScoring& scoring, const ForwardOptions& options, const at::Tensor& out,
                      const TokenLoss& loss) {
  auto& decoder = model_->decoder();
  check_result(out, batch.token_ids.sizes(), decoder.accumulate_dtype());
  ops::check_rule({static_cast<float>(scoring.temperature), scoring.top_p, scoring.top_k, false});
  NRL_CHECK_ARG(takes_token_loss(scoring) && options.keep && model_->trainable() && !batch.targets.defined() &&
                    loss.inputs.advantages.numel() == out.numel(),
                "a forward with a loss is for training a float32 or bfloat16 policy without top_p, top_k and targets, "
                "on tensors ",
                out.sizes());
  scoring_ = scoring;
  has_unfiltered_ = has_entropy_ = false;
  head_done_ = true;
  grads();
  forward_body(batch, samples, options);
  const auto logprobs =
      head_.forward_backward(decoder, h_, packed_.query, scoring, loss.at(packed_.places, packed_.samples),
                             gradients_.views().dense(), model_->workspace());
  for_each_pair(packed_, out, logprobs, to_batch);
}

at::Tensor Trainer::logits(const at::Tensor& token_ids) {
  NRL_CHECK_ARG(
      token_ids.is_cpu() && token_ids.dim() == 1 && token_ids.scalar_type() == at::kLong && token_ids.numel() > 0,
      "token_ids must be int64 [T], T >= 1, got ", token_ids.sizes());
  auto& decoder = model_->decoder();
  const std::int64_t T = token_ids.numel();
  const std::vector<ops::AttentionSequence> whole{{0, T, 0, 0}};
  const auto history = history_of(whole, decoder);
  model::NothingKept nothing(decoder, T, model_->workspace());
  const auto h =
      decoder.forward(token_ids, at::arange(T, at::kLong), history, all_rows(T), nothing, model_->workspace());
  const auto normed = at::empty(h.sizes(), h.options().dtype(decoder.compute_dtype()));
  decoder.final_norm(h, normed, at::Tensor());
  auto logits = at::empty({T, decoder.parameters().lm_head.size(0)}, h.options());
  ops::linear_forward(normed, decoder.parameters().lm_head, std::nullopt, logits);
  if (values()) return logits;
  const model::VocabSlice vocab(model_->config(), model_->peers());
  auto all = vocab.is_whole() ? logits : at::empty({T, model_->config().vocab_size}, h.options());
  if (!vocab.is_whole()) vocab.gather_rows(logits, all);
  vocab.cap(all);
  return all;
}

void Trainer::backward(const TokenOutputs& d_outputs) {
  const auto& d_unfiltered = d_outputs.unfiltered;
  NRL_CHECK(pending_ && !head_done_,
            "backward from a gradient needs a forward that keeps its activations and has no loss of its own");
  NRL_CHECK_ARG(model_->trainable(), "this model is frozen: it was built without gradients");
  NRL_CHECK_ARG(!d_unfiltered.defined() || has_unfiltered_,
                "a gradient of unfiltered log-probabilities that the forward was not asked for");
  NRL_CHECK_ARG(!d_outputs.entropy.defined() || has_entropy_,
                "a gradient of entropies that the forward was not asked for");
  pending_ = false;
  grads();
  auto& decoder = model_->decoder();
  auto& workspace = model_->workspace();
  const auto pairs_of = [&](const at::Tensor& whole) {
    const auto pairs = at::empty({static_cast<std::int64_t>(packed_.places.size())}, h_.options().device(at::kCPU));
    for_each_pair(packed_, whole, pairs, [](auto& full, auto& pair) { pair = full; });
    return pairs;
  };
  model::PairValues d_values{pairs_of(d_outputs.out).to(h_.device()),
                             d_unfiltered.defined() ? pairs_of(d_unfiltered).to(h_.device()) : at::Tensor()};
  at::Tensor d_entropy;
  if (d_outputs.entropy.defined())
    d_entropy = at::zeros({packed_.rows()}, h_.options().device(at::kCPU))
                    .index_add_(0, token_rows(), d_outputs.entropy.view({-1}).index_select(0, token_places()))
                    .to(h_.device());
  if (d_values.unfiltered.defined() && !scoring_.filters(decoder.config().vocab_size))
    d_values.logprobs += d_values.unfiltered;
  const auto dh = values() ? value_head_.backward(decoder, h_, packed_.query, d_values.logprobs,
                                                  gradients_.views().dense(), workspace)
                           : head_.backward(decoder, h_, packed_.query, d_values, d_entropy, scoring_,
                                            gradients_.views().dense(), workspace);
  backward_body(dh);
}

void Trainer::backward() {
  NRL_CHECK(pending_ && head_done_, "backward without a gradient needs a forward with a loss");
  pending_ = false;
  backward_body(
      head_.finish_backward(model_->decoder(), h_, packed_.query, gradients_.views().dense(), model_->workspace()));
}

void Trainer::backward_body(const at::Tensor& dh) {
  auto& decoder = model_->decoder();
  auto history = history_of(packed_.sequences, decoder);
  if (balance_.coefficient > 0) {
    balance_.begin = {0};
    for (const auto& s : packed_.sequences) {
      NRL_CHECK_ARG(s.prefix_length == 0, "experts are balanced over sequences that share no prompt");
      balance_.begin.push_back(s.start + s.length);
    }
    history.balance = &balance_;
  }
  NRL_CHECK(activations_ != nullptr, "backward without a forward that keeps its activations");
  const auto done = std::exchange(last_backward_, false) ? gradients_.begin_sum() : model::LayerDone();
  decoder.backward(*activations_, dh, history, gradients_.views(), model_->workspace(), done);
  if (done) gradients_.backward_done();
  activations_.reset();
}

double Trainer::take_balance_loss() {
  const auto layers = std::ranges::count_if(model_->config().layers, &model::LayerConfig::has_experts);
  return std::exchange(balance_.loss, 0.0) / static_cast<double>(std::max<std::ptrdiff_t>(1, layers));
}

void Trainer::zero_grad() {
  last_backward_ = false;
  gradients_.zero();
}

void Trainer::end_block() {
  last_backward_ = false;  // it may not have come
  gradients_.end_block();
}

const at::Tensor& Trainer::exp_avg() {
  if (!exp_avg_.defined()) exp_avg_ = zero_moments(state_.exp_avg);
  return exp_avg_;
}

const at::Tensor& Trainer::exp_avg_sq() {
  if (!exp_avg_sq_.defined()) exp_avg_sq_ = zero_moments(state_.exp_avg_sq);
  return exp_avg_sq_;
}

at::Tensor Trainer::zero_moments(std::optional<at::ScalarType> type) const {
  const auto options = model_->compute().options();
  return runtime::zeros_large({shard().size()}, options.dtype(type.value_or(model_->decoder().accumulate_dtype())));
}

OptimizerStep Trainer::step(const ops::AdamWSettings& settings, double max_grad_norm) {
  OptimizerStep result;
  last_backward_ = false;
  gradients_.add_all();
  result.grad_norm = gradients_.norm();
  result.finite = std::isfinite(result.grad_norm);
  if (!result.finite) return result;
  // torch.nn.utils.clip_grad_norm_'s rule
  const double scale = max_grad_norm > 0 ? std::min(1.0, max_grad_norm / (result.grad_norm + 1e-6)) : 1.0;
  ++optimizer_steps_;
  update(settings, scale);
  return result;
}

/// AdamW on this rank's shard; then every rank has all new weights.
void Trainer::update(const ops::AdamWSettings& settings, double scale) {
  const auto own = [shard = shard()](const at::Tensor& flat) { return flat.narrow(0, shard.begin, shard.size()); };
  const auto& masters = model_->masters();
  const auto& remainders = model_->remainders();
  const auto compute = model_->has_separate_masters() ? own(model_->compute()) : at::Tensor();
  const auto weights = remainders.defined()                ? own(model_->compute())
                       : masters.numel() == shard().size() ? masters
                                                           : own(masters);
  for (const auto& [begin, end] : model_->trained_parts(shard().begin, shard().end)) {
    const auto part = [first = begin - shard().begin, count = end - begin](const at::Tensor& of_shard) {
      return of_shard.narrow(0, first, count);
    };
    const auto part_if = [&part](const at::Tensor& of_shard) {
      return of_shard.defined() ? std::optional<at::Tensor>(part(of_shard)) : std::nullopt;
    };
    ops::adamw_step({part(weights), part(gradients_.of_shard()), part(exp_avg()), part(exp_avg_sq()), part_if(compute),
                     begin, part_if(remainders)},
                    settings, optimizer_steps_, scale);
  }
  if (auto* const ranks = gradients_.shards())
    ranks->all_gather(model_->updated(), ops::kFlatBlock, "the new weights of all ranks");
  if (model_->adapters() != nullptr) model_->masters_changed();
  else model_->weights_changed();
}

}  // namespace nemo_rl::trainer
