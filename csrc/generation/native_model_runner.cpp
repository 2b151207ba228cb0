#include "generation/native_model_runner.h"

#include <ATen/ATen.h>

#include <cmath>

#include "common/check.h"
#include "ops/linear.h"

namespace nemo_rl::generation {

NativeModelRunner::NativeModelRunner(std::shared_ptr<model::DecoderModel> model) : model_(std::move(model)), workspace_(model_->device()) {
  const auto& c = model_->config();
  NRL_CHECK_ARG(!c.value_head, "a value model has no vocabulary to generate from");
  NRL_CHECK_ARG(model_->decoder().compute_dtype() != at::kDouble, "generation samples from float32 logits: use float32 or bfloat16");
  heads_ = {c.num_heads, c.num_kv_heads, c.head_dim, 1.0 / std::sqrt(static_cast<double>(c.head_dim))};
}

std::int64_t NativeModelRunner::vocab_size() const { return model_->config().vocab_size; }
std::int64_t NativeModelRunner::block_size() const { return ops::kKeyTile; }

std::int64_t NativeModelRunner::bytes_per_block() const {
  const auto& c = model_->config();
  return 2 * c.num_layers * c.num_kv_heads * c.head_dim * ops::kKeyTile * static_cast<std::int64_t>(c10::elementSize(model_->decoder().compute_dtype()));
}

void NativeModelRunner::allocate_cache(std::int64_t num_blocks) {
  cache_.clear();
  for (std::int64_t l = 0; l < model_->config().num_layers; ++l)
    cache_.push_back(ops::kv_cache_allocate(num_blocks, heads_, model_->decoder().compute_dtype(), model_->device()));
}

void NativeModelRunner::release_cache() {
  cache_.clear();
  workspace_.clear();
}

at::Tensor NativeModelRunner::forward(const ForwardBatch& batch) {
  NRL_CHECK(!cache_.empty(), "forward before allocate_cache");
  auto& decoder = model_->decoder();
  const auto T = static_cast<std::int64_t>(batch.token_ids.size());
  const auto token_ids = at::tensor(batch.token_ids, at::kLong), positions = at::empty({T}, at::kLong);
  std::vector<ops::PagedSlice> slices;
  for (const auto& s : batch.slices) {
    slices.push_back({s.query_start, s.query_length, s.context_length, s.block_table.data(), static_cast<std::int64_t>(s.block_table.size())});
    for (std::int64_t i = 0; i < s.query_length; ++i) positions.data_ptr<std::int64_t>()[s.query_start + i] = s.context_length + i;
  }
  for (const auto& copy : batch.copies)
    for (auto& layer : cache_) ops::kv_cache_copy(layer, copy.from, copy.to, copy.length);

  const model::Attention attention = [&](std::int64_t layer, const at::Tensor& qkv, at::Tensor& out, at::Tensor&) {
    ops::attention_paged(qkv, slices, heads_, cache_[static_cast<std::size_t>(layer)], out);
  };
  const auto h = decoder.forward(token_ids, positions, attention, batch.logits_rows, workspace_);

  const auto R = h.size(0);
  const auto normed = workspace_.take("rows.normed", h.sizes(), decoder.compute_dtype());
  decoder.final_norm(h, normed, at::Tensor());
  const auto logits = workspace_.take("logits", {R, vocab_size()}, at::kFloat);
  ops::linear_forward(normed, decoder.parameters().lm_head, std::nullopt, logits);
  return logits;
}

}  // namespace nemo_rl::generation
