#include "ops/likeliest.h"

#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {
namespace {

/// The ids of the `count` largest values, largest first, equal ones by id.
std::vector<std::int64_t> largest(const float* x, std::int64_t V, std::int64_t count) {
  std::vector<std::int64_t> ids;
  for (std::int64_t v = 0; v < V; ++v) {
    if (static_cast<std::int64_t>(ids.size()) == count && !(x[v] > x[ids.back()])) continue;
    const auto place =
        std::upper_bound(ids.begin(), ids.end(), x[v], [&](float a, std::int64_t b) { return a > x[b]; });
    ids.insert(place, v);
    if (static_cast<std::int64_t>(ids.size()) > count) ids.pop_back();
  }
  return ids;
}

}  // namespace

std::vector<SampledToken> likeliest(const at::Tensor& logits, std::int64_t row, std::int64_t count,
                                    const SamplingRule& rule) {
  NRL_CHECK_ARG(count >= 0 && count <= kMostLikeliest, "the ", count, " likeliest tokens: expected 0 to ",
                kMostLikeliest);
  if (count == 0) return {};
  const at::Tensor x = logits.select(0, row).to(at::kCPU, at::kFloat).contiguous();
  const std::int64_t V = x.size(0);
  const float* data = x.const_data_ptr<float>();
  const std::vector<std::int64_t> ids = largest(data, V, std::min(count, V));
  std::vector<SampledToken> found;
  for (const std::int64_t id : ids) {
    const auto scratch = rule.filters(V) ? thread_filter_scratch(V) : kernels::FilterScratch{};
    const SampledToken scored = kernels::score_row(data, V, rule, id, scratch, /*with_entropy=*/false);
    if (std::isfinite(scored.logprob)) found.push_back(scored);
  }
  return found;
}

}  // namespace nemo_rl::ops
