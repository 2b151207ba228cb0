#include "trainer/gradients.h"

#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "ops/adamw.h"
#include "runtime/large_tensor.h"
#include "runtime/tensor.h"

namespace nemo_rl::trainer {

Gradients::Gradients(model::DecoderModel& model, TrainedTogether together)
    : model_(model), together_(std::move(together)) {
  NRL_CHECK_ARG(!together_.shard_gradients || together_.ranks == nullptr || together_.beside != nullptr,
                "sharded gradients are added beside the backward, which needs a communicator of its own");
  NRL_CHECK_ARG(together_.beside == nullptr || model_.device().is_cpu(),
                "gradients are added beside the backward on the CPU only, not on ", model_.device().str());
  if (together_.ranks == nullptr) together_.shard_gradients = false;  // nobody to share them with
  if (together_.ranks != nullptr) shards_.emplace(together_.ranks);
  if (together_.ranks == nullptr || together_.beside == nullptr) return;
  const auto& layout = model_.trained_layout();
  const auto layers = static_cast<std::size_t>(model_.config().num_layers());
  layer_begin_.assign(layers, layout.total);
  const auto begin_of = [&](const std::string& prefix, std::int64_t otherwise) {
    const auto first = std::ranges::find_if(layout.specs, [&](const auto& s) { return s.name.starts_with(prefix); });
    return first == layout.specs.end() ? otherwise : first->offset;
  };
  // a frozen part begins where the next one does
  head_begin_ = begin_of("model.norm.weight", begin_of("score.weight", layout.total));
  for (std::size_t l = layers; l-- > 0;)
    layer_begin_[l] =
        begin_of("model.layers." + std::to_string(l) + ".", l + 1 < layers ? layer_begin_[l + 1] : head_begin_);
  auto starts = layer_begin_;
  starts.insert(starts.end(), {0, head_begin_});
  exchange_ = std::make_unique<distributed::GradientExchange>(together_.beside, std::move(starts), layout.total,
                                                              ops::kFlatBlock);
}

distributed::Shard Gradients::shard() const {
  const auto total = model_.trained_layout().total;
  const auto& ranks = together_.ranks;
  return ranks == nullptr ? distributed::Shard{0, total}
                          : distributed::shard_of(total, ranks->rank(), ranks->size(), ops::kFlatBlock);
}

// ---- the buffer of a backward

const at::Tensor& Gradients::flat() {
  if (!flat_.defined()) use_free_buffer();
  return flat_;
}

const model::GradientViews& Gradients::views() {
  flat();
  return *views_;
}

void Gradients::use(at::Tensor flat) {
  flat_ = std::move(flat);
  views_.emplace(model_.gradient_views(flat_));
}

/// A cleared one.
void Gradients::use_free_buffer() {
  const auto options = model_.compute().options().dtype(model_.decoder().accumulate_dtype());
  if (together_.shard_gradients) {
    auto fresh = runtime::empty_large({model_.trained_layout().total}, options);
    runtime::give_up(fresh);
    return use(std::move(fresh));
  }
  auto spare = blocks_.spare();
  if (!spare.defined()) return use(runtime::zeros_large({model_.trained_layout().total}, options));
  runtime::clear(spare);
  use(std::move(spare));
}

double Gradients::flat_norm() const { return flat_.defined() ? ops::l2_norm(flat_) : 0.0; }

bool Gradients::are_finite() {
  const bool own = std::isfinite(ops::l2_norm(flat()));  // at::sum would copy all of it to float64
  if (model_.peers() == nullptr) return own;
  return model_.peers()->gather(at::full({1}, own ? 1 : 0, at::kInt), "looking for a gradient").all().item<bool>();
}

// ---- sums

void Gradients::zero() {
  if (sums_beside() && exchange_->is_running()) exchange_->finish();  // of a step that another rank has given up
  blocks_.clear();
  if (shard_sum_.defined()) blocks_.give_back(std::move(shard_sum_));  // for the next sum: else there would be two
  if (together_.shard_gradients) return runtime::give_up(flat());
  runtime::clear(flat());
}

/// Sums the gradients of what every slice has, but each slice uses for its own heads alone: the norms of queries and
/// keys, or the repeated half of an adapter. Those of the other repeated parameters are the same on all slices already.
void Gradients::add_shared() {
  for (std::int64_t l = 0; l < model_.config().num_layers(); ++l) add_shared_of(static_cast<std::size_t>(l));
}

void Gradients::add_shared_of(std::size_t layer) {
  if (model_.peers() == nullptr) return;
  std::vector<at::Tensor> parts;
  if (model_.adapters() != nullptr) {
    parts = model_.adapters()->partial(static_cast<std::int64_t>(layer), flat());
  } else if (model_.config().qk_norm == model::QkNorm::head) {
    const auto& l = views().dense().layers[layer];
    parts = {l.q_norm, l.k_norm};
  }
  if (parts.empty()) return;
  const auto all = at::cat(parts);
  model_.peers()->sum(all, "adding the gradients that each slice has a part of");
  std::int64_t at = 0;
  for (const auto& part : parts) part.copy_(all.narrow(0, at, part.numel())), at += part.numel();
}

model::LayerDone Gradients::begin_sum() {
  begin_round(/*with_flat=*/true);
  exchange_->final_from(head_begin_);
  return [this](std::int64_t layer) {
    add_shared_of(static_cast<std::size_t>(layer));
    exchange_->final_from(layer_begin_[static_cast<std::size_t>(layer)]);
  };
}

void Gradients::backward_done() { exchange_->final_from(0); }

void Gradients::abandon() {
  if (!sums_beside()) return;
  if (!exchange_->is_running()) begin_round(/*with_flat=*/true);
  exchange_->final_from(0);
}

/// The buffers of this rank's blocks begin to be added. `with_flat`: what lies in flat() is the last block; else all
/// blocks have ended.
void Gradients::begin_round(bool with_flat) {
  distributed::GradientExchange::Round round;
  if (together_.shard_gradients) {
    round.terms = {flat()};
    round.sum = blocks_.spare();
    if (!round.sum.defined()) round.sum = at::empty({shard().size()}, flat().options());
    round.give_up_memory = true;
  } else {
    round.terms = blocks_.take_subtrees();
    if (with_flat) {
      round.terms.push_back(flat());
    } else {
      flat();
      blocks_.give_back(std::move(flat_));  // and nobody else has it: the sum may fail
      views_.reset();
    }
    round.sum = round.terms.front().narrow(0, shard().begin, shard().size());
  }
  exchange_->begin(std::move(round));
}

void Gradients::end_round() {
  if (!exchange_->is_running()) {
    const bool with_flat = together_.shard_gradients || blocks_.count() == 0;
    if (with_flat) add_shared();
    begin_round(with_flat);
  }
  auto round = exchange_->finish();
  if (together_.shard_gradients) return blocks_.add(std::move(round.sum));
  use(std::move(round.terms.front()));
  for (std::size_t i = 1; i < round.terms.size(); ++i) blocks_.give_back(std::move(round.terms[i]));
}

void Gradients::end_block() {
  if (together_.shard_gradients) return end_round();
  if (sums_beside() && exchange_->is_running()) return;  // the last block, whose sum add_all awaits
  add_shared();
  blocks_.add(flat());
  use_free_buffer();
}

void Gradients::add_all() {
  flat();
  if (sums_beside()) {
    if (!together_.shard_gradients || exchange_->is_running() || blocks_.count() == 0) end_round();
    if (!together_.shard_gradients) return;
    shard_sum_ = blocks_.take();
    return;
  }
  if (blocks_.count() > 0) {
    blocks_.give_back(flat_);  // of a block that has not begun
    use(blocks_.take());
  } else {
    add_shared();
  }
  if (shards_) shards_->reduce_scatter(flat_, ops::kFlatBlock, "adding the gradients of all ranks");
}

at::Tensor Gradients::of_shard() const {
  if (together_.shard_gradients) return shard_sum_;
  return flat_.narrow(0, shard().begin, shard().size());
}

// ---- the norm

/// What all slices repeat counts once.
double Gradients::norm() {
  auto* const peers = model_.peers();
  if (peers == nullptr) return slice_norm();
  const auto own = of_shard();
  const auto [begin, end] = shard();
  std::vector<at::Tensor> repeated;
  if (peers->rank() > 0)
    for (const auto& spec : model_.trained_layout().specs) {
      const auto from = std::max(spec.offset, begin), to = std::min(spec.offset + spec.numel, end);
      if (spec.split == model::ParameterSpec::kWhole && from < to)
        repeated.push_back(own.narrow(0, from - begin, to - from));
    }
  std::vector<at::Tensor> copies;
  for (auto& part : repeated) copies.push_back(part.clone()), part.zero_();
  const double norm = slice_norm();
  for (std::size_t i = 0; i < repeated.size(); ++i) repeated[i].copy_(copies[i]);
  const auto squares = peers->gather(at::full({1}, norm * norm, at::kDouble), "the gradient norm of all slices");
  return ops::norm_of_blocks(squares.view(-1));
}

/// Of this slice: as l2_norm of it, to the bit.
double Gradients::slice_norm() {
  if (!shards_) return flat_norm();
  const auto own = ops::block_squares(of_shard());
  const auto blocks = (model_.trained_layout().total + ops::kFlatBlock - 1) / ops::kFlatBlock;
  const auto all = at::zeros({blocks}, at::kDouble);
  all.narrow(0, (shard().begin + ops::kFlatBlock - 1) / ops::kFlatBlock, own.numel()).copy_(own);
  shards_->all_gather(all, /*block=*/1, "the gradient norm");
  return ops::norm_of_blocks(all);
}

}  // namespace nemo_rl::trainer
