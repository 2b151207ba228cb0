#include "generation/native_model_runner.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "common/check.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "runtime/large_tensor.h"
#include "runtime/team.h"
#include "runtime/tensor.h"

namespace nemo_rl::generation {
namespace {

/// Up to so many rows the other threads are kept at hand for a whole step: its pieces of work are too small to wake
/// them for each.
constexpr std::int64_t kTeamRows = 64;

/// A step of up to so many rows reads the weights once and takes at most twice as long as one of a single row.
constexpr std::int64_t kDraftRows = 8;

/// Whether every row is the one new token of a sequence, and its logits are wanted.
bool is_decode(const ForwardBatch& batch) {
  const std::size_t T = batch.token_ids.size();
  if (T == 0 || batch.slices.size() != T || batch.logits_rows.size() != T) return false;
  for (std::size_t t = 0; t < T; ++t) {
    const auto& s = batch.slices[t];
    if (s.query_start != static_cast<std::int64_t>(t) || s.query_length != 1 || batch.logits_rows[t] != s.query_start)
      return false;
  }
  return true;
}

/// Those of the batch's rows; empty: all are computed by the runner's model as it is.
std::vector<model::AdapterRows> adapters_of(const ForwardBatch& batch, const model::DecoderModel& own) {
  std::vector<model::AdapterRows> rows;
  bool has_others = false;
  for (const auto& s : batch.slices) {
    rows.push_back({s.query_length, s.adapted == nullptr ? own.adds_adapters() : s.adapted->adds_adapters()});
    has_others = has_others || s.adapted != nullptr;
  }
  if (!has_others) rows.clear();
  return rows;
}

}  // namespace

NativeModelRunner::NativeModelRunner(std::shared_ptr<model::DecoderModel> model, RecordedSteps::Recorder recorder,
                                     std::int64_t pack_after)
    : model_(std::move(model)),
      vocab_(model_->config(), model_->peers()),
      workspace_(model_->device()),
      recorded_(std::move(recorder)),
      pack_after_(pack_after),
      kept_rows_(ops::kKeyTile) {
  NRL_CHECK_ARG(!model_->config().value_head, "a value model has no vocabulary to generate from");
  NRL_CHECK_ARG(model_->decoder().compute_dtype() != at::kDouble,
                "generation samples from float32 logits: use float32 or bfloat16");
  const auto& decoder = model_->decoder();
  const auto element = static_cast<std::int64_t>(c10::elementSize(decoder.compute_dtype()));
  std::map<std::int64_t, std::pair<std::int64_t, ops::AttentionHeads>> by_window;  // bytes of a block, heads
  for (std::int64_t l = 0; l < model_->config().num_layers(); ++l) {
    const auto& layer = model_->config().layers[static_cast<std::size_t>(l)];
    if (!layer.has_attention()) continue;
    auto& [bytes, heads] = by_window[layer.window];
    heads = decoder.attention_heads(l);
    if (layer.has_own_keys()) bytes += 2 * heads.num_kv_heads * heads.head_dim * ops::kKeyTile * element;
  }
  if (by_window.empty()) by_window[0].second = decoder.attention_heads(0);
  for (auto& [window, pool] : by_window) {
    pools_.push_back({window, pool.first});
    pool.second.sinks = at::Tensor();
    steps_.emplace_back(pool.second, model_->device());
  }
  row_steps_ = steps_;
  // A draft that turns out wrong would have to be taken back from recurrent states. Each of several rows may choose
  // other experts, and a GPU's recorded steps have one row for each sequence.
  if (model_->device().is_cpu() && !has_states() && !model_->config().has_experts()) draft_rows_ = kDraftRows;
}

void NativeModelRunner::set_draft_rows(std::int64_t rows) {
  NRL_CHECK_ARG(rows == 0 || !has_states(), "draft_rows = ", rows, ": a model with recurrent states takes no drafts");
  draft_rows_ = rows;
}

std::int64_t NativeModelRunner::vocab_size() const { return model_->config().vocab_size; }
std::int64_t NativeModelRunner::block_size() const { return ops::kKeyTile; }

/// The pool of a layer with attention.
std::size_t NativeModelRunner::pool_of(std::size_t layer) const {
  const std::int64_t window = model_->config().layers[layer].window;
  return static_cast<std::size_t>(std::ranges::find(pools_, window, &CachePool::window) - pools_.begin());
}

void NativeModelRunner::allocate_cache(const std::vector<std::int64_t>& num_blocks) {
  recorded_.clear();
  cache_.clear();
  const auto& layers = model_->config().layers;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    cache_.emplace_back();
    if (layers[i].has_own_keys())
      cache_.back() = ops::kv_cache_allocate(num_blocks[pool_of(i)],
                                             model_->decoder().attention_heads(static_cast<std::int64_t>(i)),
                                             model_->decoder().compute_dtype(), model_->device());
    // what layers that read another's keys write there is what it holds
    else if (layers[i].has_attention()) cache_.back() = cache_[static_cast<std::size_t>(layers[i].keys_of)];
  }
  num_blocks_ = num_blocks;
  kept_rows_.begin(num_blocks.front());
}

void NativeModelRunner::check_adapted(const model::DecoderModel* adapted) const {
  NRL_CHECK_ARG(adapted == nullptr || (adapted->adds_adapters() != nullptr &&
                                       adapted->compute().const_data_ptr() == model_->compute().const_data_ptr()),
                "a request's adapters must be apart (merge false) and of a model made by base() of the engine's model");
}

void NativeModelRunner::allocate_states(std::int64_t count) {
  const auto& shape = model_->config().recurrent;
  const auto options = model_->compute().options();
  states_.clear();
  for (const auto& layer : model_->config().layers) {
    states_.emplace_back();
    if (!layer.is_recurrent) continue;
    states_.back().inputs = runtime::empty_large({count, shape.conv_width - 1, shape.conv_size()}, options);
    states_.back().state =
        runtime::empty_large({count, shape.value_heads, shape.state_size()}, options.dtype(at::kFloat));
  }
}

void NativeModelRunner::release_cache() {
  recorded_.clear();
  cache_.clear();
  states_.clear();
  workspace_.clear();
}

at::Tensor NativeModelRunner::forward(const ForwardBatch& batch) {
  NRL_CHECK(!cache_.empty(), "forward before allocate_cache");
  ops::check_token_ids(batch.token_ids, vocab_size(), "forward");
  for (const auto& copy : batch.copies)
    for (std::size_t i = 0; i < cache_.size(); ++i)
      if (cache_[i].defined() && pool_of(i) == static_cast<std::size_t>(copy.pool))
        ops::kv_cache_copy(cache_[i], copy.from, copy.to, copy.length);
  for (const auto& copy : batch.state_copies)
    for (const auto& layer : states_)
      if (layer.state.defined()) {
        layer.inputs[copy.to].copy_(layer.inputs[copy.from]);
        layer.state[copy.to].copy_(layer.state[copy.from]);
      }

  const auto T = static_cast<std::int64_t>(batch.token_ids.size());
  const auto adapters = adapters_of(batch, *model_);
  // A step with experts waits for the device to know how many tokens each of them gets, and one with states gets lists
  // of their places, so they are not recorded.
  const bool recorded =
      recorded_.enabled() && is_decode(batch) && adapters.empty() && !model_->config().has_experts() && !has_states();
  const std::int64_t rows = recorded ? recorded_rows(T) : T;
  set_steps(batch, rows);
  model_->decoder().reserve_positions(steps_.front().num_positions());
  if (!recorded) {
    const auto* const packed = model_->packed_for(T, pack_after_);
    const auto before = history(batch);
    const auto compute = [&] {
      keep_ && model_->kept().enabled() && adapters.empty() ? run_keeping(batch, before, packed)
                                                            : run(batch.logits_rows, before, packed, adapters);
    };
    // Threads of a team never sleep: they would keep the processor from the messages of peers.
    if (model_->device().is_cpu() && T <= kTeamRows && model_->peers() == nullptr) {
      runtime::Team::lead(compute);
    } else {
      compute();
    }
    return logits(static_cast<std::int64_t>(batch.logits_rows.size()));
  }
  std::vector<std::int64_t> all(static_cast<std::size_t>(rows));
  std::iota(all.begin(), all.end(), 0);
  recorded_.run(rows, [this] { return places(); }, [this, all] { run(all, history({}), nullptr); });
  return logits(rows).narrow(0, 0, T);
}

void NativeModelRunner::set_steps(const ForwardBatch& batch, std::int64_t rows) {
  const auto R = static_cast<std::int64_t>(batch.logits_rows.size());
  const auto& logits_rows = batch.logits_rows;
  attends_rows_ = model_->decoder().shares_last_keys() && R < static_cast<std::int64_t>(batch.token_ids.size());
  for (std::size_t p = 0; p < pools_.size(); ++p) {
    std::vector<ops::PagedSlice> slices, of_rows;
    for (const auto& s : batch.slices) {
      const BlockTable& table = s.block_tables[p];
      slices.push_back(
          {s.query_start, s.query_length, s.context_length, table.data(), static_cast<std::int64_t>(table.size())});
      for (std::size_t row = of_rows.size();
           row < logits_rows.size() && logits_rows[row] < s.query_start + s.query_length; ++row)
        of_rows.push_back({static_cast<std::int64_t>(row), 1, s.context_length + logits_rows[row] - s.query_start,
                           table.data(), slices.back().block_table_length});
    }
    if (attends_rows_)
      row_steps_[p].set(std::move(of_rows), std::vector<std::int64_t>(batch.logits_rows.size()), R, num_blocks_[p]);
    steps_[p].set(std::move(slices), batch.token_ids, rows, num_blocks_[p]);
  }
}

model::History NativeModelRunner::history(const ForwardBatch& batch) {
  model::History history;
  history.attention = [this](std::int64_t layer, const at::Tensor& qkv, at::Tensor& out, at::Tensor& lse) {
    const auto i = static_cast<std::size_t>(layer);
    const auto& steps = qkv.size(0) == steps_.front().token_ids().numel() ? steps_ : row_steps_;
    ops::attention_paged(qkv, steps[pool_of(i)], model_->decoder().attention_heads(layer), cache_[i], out, lse);
  };
  history.attends_rows = attends_rows_;
  if (!has_states()) return history;
  for (const auto& s : batch.slices)
    history.sequences.push_back(
        {s.query_start, s.query_length, ops::RecurrentSequence::kNone, s.state, s.context_length > 0});
  history.state = [this](std::int64_t layer) { return states_[static_cast<std::size_t>(layer)]; };
  return history;
}

/// Computes the step: the logits of `rows`. Reads nothing that belongs to one batch but what lies in steps_.
void NativeModelRunner::run(std::span<const std::int64_t> rows, const model::History& history,
                            const ops::PackedWeights* packed, model::RowAdapters adapters) {
  model::NothingKept nothing(model_->decoder(), steps_.front().token_ids().numel(), workspace_);
  finish(model_->decoder().forward(steps_.front().token_ids(), steps_.front().positions(), history, rows, nothing,
                                   workspace_, packed, adapters),
         packed);
}

/// The same, with the rows that training will need put where it finds them.
void NativeModelRunner::run_keeping(const ForwardBatch& batch, const model::History& history,
                                    const ops::PackedWeights* packed) {
  auto& kept = model_->kept();
  try {
    const auto& nodes = kept_rows_.plan(batch, kept);
    model::KeptSink sink(model_->decoder(), kept, nodes, workspace_);
    finish(model_->decoder().forward(steps_.front().token_ids(), steps_.front().positions(), history, batch.logits_rows,
                                     sink, workspace_, packed),
           packed);
  } catch (...) {
    kept.clear();  // rows were promised that are not there
    throw;
  }
}

/// The logits of rows h [R, D] of the residual stream.
void NativeModelRunner::finish(const at::Tensor& h, const ops::PackedWeights* packed) {
  const auto& decoder = model_->decoder();
  ops::linear_ask_ahead(decoder.parameters().lm_head, /*gated=*/false, packed);
  const auto normed = workspace_.take(model::Slot::rows_normed, h.sizes(), decoder.compute_dtype());
  decoder.final_norm(h, normed, at::Tensor());
  const auto& w = decoder.parameters().lm_head;
  const auto whole = logits(h.size(0));
  if (vocab_.is_whole()) {
    ops::linear_forward(normed, w, std::nullopt, whole, /*accumulate=*/false, packed);
    return vocab_.cap(whole);
  }
  const auto own = workspace_.take(model::Slot::own_logits, {h.size(0), w.size(0)}, at::kFloat);
  ops::linear_forward(normed, w, std::nullopt, own, /*accumulate=*/false, packed);
  vocab_.gather_rows(own, whole);
  vocab_.cap(whole);
}

at::Tensor NativeModelRunner::logits(std::int64_t rows) {
  return workspace_.take(model::Slot::logits, {rows, vocab_size()}, at::kFloat);
}

/// Of everything that a step reads or writes and that may move.
std::vector<const void*> NativeModelRunner::places() const {
  auto all = workspace_.places();
  for (const auto& layer : cache_) all.push_back(layer.const_data_ptr());
  for (const auto& step : steps_) all.push_back(step.place());
  all.insert(all.end(), {model_->decoder().rope_place(), model_->compute().const_data_ptr(),
                         model_->decoder().parameters().lm_head.const_data_ptr()});
  return all;
}

}  // namespace nemo_rl::generation
