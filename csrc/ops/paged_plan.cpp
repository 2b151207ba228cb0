#include "ops/paged_plan.h"

#include <algorithm>

namespace nemo_rl::ops {

using kernels::AttentionRows;
using kernels::kKeyTile;

PagedPlan paged_plan(std::span<const kernels::PagedSlice> slices, const kernels::AttentionShape& shape,
                     std::int64_t rows) {
  const auto kind_of = [&](std::int64_t tokens) {
    return tokens * shape.group() <= kernels::attention_block_rows(AttentionRows::few, shape) ? AttentionRows::few
                                                                                              : AttentionRows::many;
  };
  PagedPlan plan;
  plan.slots.assign(static_cast<std::size_t>(rows), -1);
  for (const kernels::PagedSlice& s : slices) {
    const auto table = static_cast<std::int64_t>(plan.block_tables.size());
    plan.block_tables.insert(plan.block_tables.end(), s.block_table, s.block_table + s.block_table_length);
    const AttentionRows kind = kind_of(s.query_length);
    const std::int64_t step = std::max<std::int64_t>(1, kernels::attention_block_rows(kind, shape) / shape.group());
    for (std::int64_t token = 0; token < s.query_length; token += step)
      plan.of(kind).push_back(
          {s.query_start + token, std::min(step, s.query_length - token), s.context_length + token, 0, 0, 0, table});
    for (std::int64_t token = 0; token < s.query_length; ++token) {
      const std::int64_t position = s.context_length + token;
      plan.slots[static_cast<std::size_t>(s.query_start + token)] =
          s.block_table[position / kKeyTile] * kKeyTile + position % kKeyTile;
    }
  }
  for (std::int64_t row = 0; row < rows; ++row)
    if (plan.slots[static_cast<std::size_t>(row)] < 0) plan.of(kind_of(1)).push_back({row, 0, 0, 0, 0, 0, 0});
  return plan;
}

}  // namespace nemo_rl::ops
