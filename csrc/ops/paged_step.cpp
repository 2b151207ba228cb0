#include "ops/paged_step.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "ops/attention_checks.h"
#include "ops/paged_plan.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {
namespace {

/// Puts values at the end of an array of int64, and says where.
template <class T>
std::size_t append(std::vector<std::int64_t>& to, const std::vector<T>& values) {
  const std::size_t at = to.size(), bytes = values.size() * sizeof(T);
  to.resize(at + (bytes + sizeof(std::int64_t) - 1) / sizeof(std::int64_t));
  if (bytes > 0) std::memcpy(to.data() + at, values.data(), bytes);
  return at;
}

}  // namespace

void PagedStep::set(std::vector<PagedSlice> slices, std::span<const std::int64_t> token_ids, std::int64_t rows,
                    std::int64_t num_blocks) {
  check_slices(slices, rows, num_blocks, heads_.window);
  NRL_CHECK(static_cast<std::int64_t>(token_ids.size()) <= rows, "a step of ", rows, " rows got ", token_ids.size(),
            " tokens");
  slices_ = std::move(slices);
  num_blocks_ = num_blocks;
  num_positions_ = 1;
  host_.assign(static_cast<std::size_t>(2 * rows), 0);
  std::copy(token_ids.begin(), token_ids.end(), host_.begin());
  for (const PagedSlice& s : slices_) {
    for (std::int64_t i = 0; i < s.query_length; ++i)
      host_[static_cast<std::size_t>(rows + s.query_start + i)] = s.context_length + i;
    num_positions_ = std::max(num_positions_, s.context_length + s.query_length);
  }
  std::size_t slots = 0, blocks[2] = {0, 0}, tables = 0;
  if (device_.is_cuda()) {
    const PagedPlan plan =
        paged_plan(slices_, {heads_.num_heads, heads_.num_kv_heads, heads_.head_dim, heads_.scale, {}}, rows);
    slots = append(host_, plan.slots);
    for (int kind = 0; kind < 2; ++kind) {
      blocks[kind] = append(host_, plan.blocks[kind]);
      arrays_.num_blocks[kind] = static_cast<std::int64_t>(plan.blocks[kind].size());
    }
    tables = append(host_, plan.block_tables);  // last: its length changes from step to step
  }
  upload();
  const auto* const first = static_cast<const std::int64_t*>(buffer_.const_data_ptr());
  token_ids_ = buffer_.narrow(0, 0, rows);
  positions_ = buffer_.narrow(0, rows, rows);
  arrays_.slots = first + slots;
  for (int kind = 0; kind < 2; ++kind)
    arrays_.blocks[kind] = reinterpret_cast<const kernels::AttentionBlock*>(first + blocks[kind]);
  arrays_.block_tables = reinterpret_cast<const std::int32_t*>(first + tables);
}

/// Brings host_ into the buffer, which stays where it is while it is large enough. The copy is over when this returns.
void PagedStep::upload() {
  const auto n = static_cast<std::int64_t>(host_.size());
  if (!buffer_.defined() || buffer_.numel() < n)
    buffer_ = at::empty({n + n / 2 + 64}, at::TensorOptions().dtype(at::kLong).device(device_));
  buffer_.narrow(0, 0, n).copy_(at::from_blob(host_.data(), {n}, at::kLong));
}

}  // namespace nemo_rl::ops
