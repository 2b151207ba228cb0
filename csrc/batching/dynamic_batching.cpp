#include "batching/dynamic_batching.h"

#include <algorithm>
#include <numeric>

#include "common/check.h"

namespace nemo_rl::batching {
namespace {

void check_options(std::size_t rows, const DynamicBatchingOptions& options) {
  NRL_CHECK_ARG(options.max_tokens > 0, "max_tokens_per_microbatch is ", options.max_tokens, "; it must be positive");
  NRL_CHECK_ARG(options.sequence_length_round > 0, "sequence_length_round is ", options.sequence_length_round,
                "; it must be positive");
  NRL_CHECK_ARG(options.shards > 0, "shards is ", options.shards, "; it must be positive");
  NRL_CHECK_ARG(rows == 0 || (options.batch_size > 0 && rows % static_cast<std::size_t>(options.batch_size) == 0), rows,
                " rows are no multiple of the batch size ", options.batch_size);
  NRL_CHECK_ARG(options.batch_size % options.shards == 0, "batch size ", options.batch_size, " does not split over ",
                options.shards, " shards");
}

/// Padded length of each place: the longest row over the shards there, rounded up, at most the tensor's width.
std::vector<std::int64_t> padded_lengths(std::span<const std::int64_t> lengths, std::span<const std::int64_t> chunk,
                                         const DynamicBatchingOptions& options) {
  const std::size_t places = chunk.size() / static_cast<std::size_t>(options.shards);
  std::vector<std::int64_t> padded(places, 0);
  for (std::size_t i = 0; i < chunk.size(); ++i)
    padded[i % places] = std::max(padded[i % places], lengths[static_cast<std::size_t>(chunk[i])]);
  const std::int64_t round = options.sequence_length_round;
  for (std::int64_t& length : padded) {
    length = std::min((length + round - 1) / round * round, options.width);
    NRL_CHECK_ARG(length <= options.max_tokens, "a sequence needs ", length, " padded tokens, more than the ",
                  options.max_tokens, " of a micro-batch: raise dynamic_batching.train_mb_tokens / logprob_mb_tokens");
  }
  return padded;
}

}  // namespace

DynamicBatchingPlan plan_dynamic_batching(std::span<const std::int64_t> lengths,
                                          const DynamicBatchingOptions& options) {
  check_options(lengths.size(), options);
  DynamicBatchingPlan plan;
  const auto batch_size = static_cast<std::size_t>(options.batch_size);
  const auto shards = static_cast<std::size_t>(options.shards);
  for (std::size_t start = 0; start < lengths.size(); start += batch_size) {
    std::vector<std::int64_t> sorted(batch_size);
    std::iota(sorted.begin(), sorted.end(), static_cast<std::int64_t>(start));
    std::stable_sort(sorted.begin(), sorted.end(), [&](std::int64_t a, std::int64_t b) {
      return lengths[static_cast<std::size_t>(a)] < lengths[static_cast<std::size_t>(b)];
    });
    std::vector<std::int64_t> dealt;
    for (std::size_t shard = 0; shard < shards; ++shard)
      for (std::size_t i = shard; i < batch_size; i += shards) dealt.push_back(sorted[i]);

    std::vector<std::array<std::int64_t, 2>> spans{{0, 0}};
    std::vector<std::int64_t> widths{0};
    std::int64_t place = 0;
    for (const std::int64_t length : padded_lengths(lengths, dealt, options)) {
      const std::int64_t widest = std::max(widths.back(), length);
      if ((spans.back()[1] - spans.back()[0] + 1) * widest <= options.max_tokens) {
        spans.back()[1] = place + 1;
        widths.back() = widest;
      } else {
        spans.push_back({place, place + 1});
        widths.push_back(length);
      }
      ++place;
    }
    plan.order.insert(plan.order.end(), dealt.begin(), dealt.end());
    plan.micro_batch_indices.push_back(std::move(spans));
    plan.micro_batch_lengths.push_back(std::move(widths));
  }
  return plan;
}

}  // namespace nemo_rl::batching
