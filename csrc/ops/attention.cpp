#include "ops/attention.h"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "common/check.h"
#include "ops/attention_checks.h"
#include "ops/paged_step.h"
#include "runtime/large_tensor.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

decltype(attention_forward_cuda) attention_forward_cuda("attention_forward");
decltype(attention_paged_cuda) attention_paged_cuda("attention_paged");
decltype(kv_cache_copy_cuda) kv_cache_copy_cuda("kv_cache_copy");

namespace {

constexpr std::int64_t kItemCost = 1 << 22;  // multiply-adds of a good work item

kernels::ElementType element_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return kernels::ElementType::float32;
    case at::kBFloat16:
      return kernels::ElementType::bfloat16;
    case at::kDouble:
      return kernels::ElementType::float64;
    default:
      break;
  }
  NRL_CHECK_ARG(false, "attention: qkv is ", at::toString(dtype), "; expected float32, bfloat16 or float64");
}

/// Consecutive sequences with one prefix go together until they make an item; a long one is split by tokens.
std::vector<kernels::AttentionItem> forward_items(std::span<const AttentionSequence> sequences,
                                                  const kernels::AttentionShape& shape) {
  std::vector<kernels::AttentionItem> items;
  const auto count = static_cast<std::int32_t>(sequences.size());
  const std::int64_t per_pair = 2 * shape.head_dim * shape.group();
  const std::int64_t step = kernels::kKeyTile;
  const auto add = [&](std::int32_t begin, std::int32_t end, std::int64_t first, std::int64_t last) {
    for (std::int32_t head = 0; head < shape.num_kv_heads; ++head) items.push_back({begin, end, head, first, last});
  };
  for (std::int32_t i = 0; i < count;) {
    const AttentionSequence& first = sequences[i];
    std::int32_t end = i;
    std::int64_t cost = 0;
    const auto next_cost = [&] {
      return attention_pairs(sequences[end].prefix_length, 0, sequences[end].length, shape.window) * per_pair;
    };
    do {
      cost += next_cost();
      ++end;
    } while (end < count && cost < kItemCost && next_cost() <= 2 * kItemCost &&
             sequences[end].prefix_length == first.prefix_length &&
             (first.prefix_length == 0 || sequences[end].prefix_start == first.prefix_start));
    if (end - i > 1 || cost <= 2 * kItemCost) {
      add(i, end, 0, std::numeric_limits<std::int64_t>::max());
    } else {
      // whole query tiles in absolute positions; packing the keys again for each part costs about 32 of its rows
      const std::int64_t rows_at_least = 8 * step;
      for (std::int64_t token = 0; token < first.length;) {
        std::int64_t next = token;
        do {
          next = std::min(first.length, (first.prefix_length + next + step) / step * step - first.prefix_length);
        } while (next < first.length &&
                 (next - token < rows_at_least ||
                  attention_pairs(first.prefix_length, token, next, shape.window) * per_pair < 2 * kItemCost));
        add(i, end, token, next);
        token = next;
      }
    }
    i = end;
  }
  return items;
}

/// Multiply-adds of one kv head, and as many for each value of the cache that is read.
std::int64_t paged_cost(const PagedSlice& s, const kernels::AttentionShape& shape) {
  if (s.query_length == 0) return 0;
  const std::int64_t before = s.context_length - shape.first_key(s.context_length);
  const std::int64_t pairs = attention_pairs(before, 0, s.query_length, shape.window);
  return (pairs * shape.group() + 8 * (before + s.query_length)) * 2 * shape.head_dim;
}

struct PagedWork {
  std::vector<kernels::PagedItem> items;
  std::vector<std::size_t> split;  ///< slices that are cut into several items: the cache must hold their keys before
};

/// Short work goes together until it makes an item, whole slices where there are enough of them; that of many query
/// tokens is split by them.
PagedWork paged_work(std::span<const PagedSlice> slices, const kernels::AttentionShape& shape, std::int64_t cost) {
  constexpr std::int64_t all = std::numeric_limits<std::int64_t>::max();
  PagedWork work;
  const std::int64_t kv_heads = shape.num_kv_heads, step = kernels::attention_query_tokens(shape.group());
  const std::int64_t enough = std::min(kItemCost, cost / (8 * at::get_num_threads()) + 1);
  const bool whole = static_cast<std::int64_t>(slices.size()) >= 4 * at::get_num_threads();
  kernels::PagedItem run{0, 0, 0, all, /*store=*/true};
  std::int64_t run_cost = 0;
  const auto close = [&](std::int64_t pair) {
    run.pair_end = pair;
    if (run.pair_begin < pair) work.items.push_back(run);
    run_cost = 0;
    run.pair_begin = pair;
  };
  for (std::int64_t pair = 0; pair < static_cast<std::int64_t>(slices.size()) * kv_heads; ++pair) {
    const PagedSlice& s = slices[pair / kv_heads];
    if (s.query_length <= 2 * step) {
      run_cost += paged_cost(s, shape);
      if (run_cost >= enough && (!whole || pair % kv_heads == kv_heads - 1)) close(pair + 1);
      continue;
    }
    close(pair);
    if (pair % kv_heads == 0) work.split.push_back(static_cast<std::size_t>(pair / kv_heads));
    for (std::int64_t token = 0; token < s.query_length;) {
      const std::int64_t next =
          std::min(s.query_length, (s.context_length + token) / step * step + 2 * step - s.context_length);
      work.items.push_back({pair, pair + 1, token, next});
      token = next;
    }
    run.pair_begin = pair + 1;
  }
  close(static_cast<std::int64_t>(slices.size()) * kv_heads);
  return work;
}

void check_cache(const at::Tensor& cache, const kernels::AttentionShape& shape, at::ScalarType dtype,
                 at::Device device) {
  const std::int64_t tile = shape.head_dim * kKeyTile;
  NRL_CHECK_ARG(cache.defined() && cache.dim() == 4 && cache.size(1) == shape.num_kv_heads && cache.size(2) == 2 &&
                    cache.size(3) == tile && cache.scalar_type() == dtype && cache.is_contiguous() &&
                    cache.device() == device,
                "attention: the cache must be contiguous [num_blocks, ", shape.num_kv_heads, ", 2, ", tile, "] ",
                at::toString(dtype), " on ", device.str());
}

const void* sinks_of(const AttentionHeads& heads) {
  return heads.sinks.defined() ? heads.sinks.const_data_ptr() : nullptr;
}

}  // namespace

kernels::AttentionShape attention_shape(const at::Tensor& qkv, const AttentionHeads& heads) {
  NRL_CHECK_ARG(heads.num_kv_heads > 0 && heads.num_heads > 0 && heads.num_heads % heads.num_kv_heads == 0,
                "attention: ", heads.num_heads, " heads cannot share ", heads.num_kv_heads, " key/value heads evenly");
  const std::int64_t most = qkv.is_cuda() ? 256 : kernels::kMostHeadDim;
  NRL_CHECK_ARG(heads.head_dim > 0 && heads.head_dim % 8 == 0 && heads.head_dim <= most, "attention: head_dim is ",
                heads.head_dim, "; expected a multiple of 8 up to ", most);
  const std::int64_t columns = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim;
  NRL_CHECK_ARG(qkv.dim() == 2 && (qkv.is_cpu() || qkv.is_cuda()), "attention: qkv must be [T, ", columns,
                "] on the CPU or a CUDA device");
  check_matrix("qkv", qkv, qkv.size(0), columns, qkv.scalar_type(), qkv.device());
  if (heads.sinks.defined())
    check_matrix("sinks", heads.sinks.view({1, -1}), 1, heads.num_heads, qkv.scalar_type(), qkv.device());
  return {heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.scale, element_type(qkv.scalar_type()),
          heads.window,    heads.softcap};
}

void check_slices(std::span<const PagedSlice> slices, std::int64_t tokens, std::int64_t num_blocks,
                  std::int64_t window) {
  for (std::size_t i = 0; i < slices.size(); ++i) {
    const PagedSlice& s = slices[i];
    NRL_CHECK_ARG(s.query_start >= 0 && s.query_length >= 0 && s.query_start + s.query_length <= tokens,
                  "attention: slice ", i, " takes rows ", s.query_start, "..", s.query_start + s.query_length, " of ",
                  tokens);
    const std::int64_t needed = (s.context_length + s.query_length + kKeyTile - 1) / kKeyTile;
    NRL_CHECK_ARG(s.context_length >= 0 && needed <= s.block_table_length, "attention: slice ", i, " reaches position ",
                  s.context_length + s.query_length, ", which needs ", needed, " cache blocks of ", kKeyTile,
                  "; its block table has ", s.block_table_length);
    const std::int64_t first_read = kernels::AttentionShape{.window = window}.first_key(s.context_length) / kKeyTile;
    for (std::int64_t b = 0; b < needed; ++b)
      NRL_CHECK_ARG(s.block_table[b] >= (b < first_read ? -1 : 0) && s.block_table[b] < num_blocks, "attention: slice ",
                    i, " names cache block ", s.block_table[b], " of ", num_blocks);
  }
}

void check_matrix(const char* name, const at::Tensor& x, std::int64_t tokens, std::int64_t columns,
                  at::ScalarType dtype, at::Device device) {
  NRL_CHECK_ARG(x.defined() && x.dim() == 2 && x.size(0) == tokens && x.size(1) == columns &&
                    x.scalar_type() == dtype && x.is_contiguous() && x.device() == device,
                "attention: ", name, " must be contiguous [", tokens, ", ", columns, "] ", at::toString(dtype), " on ",
                device.str());
}

std::vector<std::int32_t> check_sequences(std::span<const AttentionSequence> sequences, std::int64_t tokens) {
  std::vector<std::int32_t> order(sequences.size()), owner(sequences.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return sequences[a].start < sequences[b].start; });
  std::unordered_map<std::int64_t, std::int32_t> at_start;
  std::int64_t end = 0;
  for (const std::int32_t i : order) {
    const AttentionSequence& s = sequences[i];
    NRL_CHECK_ARG(s.start >= 0 && s.length >= 0 && s.start + s.length <= tokens, "attention: sequence ", i,
                  " takes rows ", s.start, "..", s.start + s.length, " of ", tokens);
    if (s.length == 0) continue;
    NRL_CHECK_ARG(s.start >= end, "attention: the rows of sequence ", i, " (from ", s.start,
                  ") overlap those of the one before it, which end at ", end);
    end = s.start + s.length;
    if (s.prefix_length == 0) at_start[s.start] = i;
  }
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const AttentionSequence& s = sequences[i];
    owner[i] = static_cast<std::int32_t>(i);
    if (s.prefix_length == 0) continue;
    const auto found = at_start.find(s.prefix_start);
    NRL_CHECK_ARG(s.prefix_length > 0 && found != at_start.end() && sequences[found->second].length >= s.prefix_length,
                  "attention: sequence ", i, " shares rows ", s.prefix_start, "..", s.prefix_start + s.prefix_length,
                  " as its prefix; they must be the beginning of a sequence without a prefix");
    owner[i] = found->second;
  }
  return owner;
}

void attention_forward(const at::Tensor& qkv, std::span<const AttentionSequence> sequences, const AttentionHeads& heads,
                       at::Tensor& out, at::Tensor& lse) {
  const kernels::AttentionShape shape = attention_shape(qkv, heads);
  const std::int64_t tokens = qkv.size(0);
  check_matrix("out", out, tokens, heads.num_heads * heads.head_dim, qkv.scalar_type(), qkv.device());
  if (lse.defined())
    check_matrix("lse", lse, tokens, heads.num_heads, qkv.scalar_type() == at::kDouble ? at::kDouble : at::kFloat,
                 qkv.device());
  check_sequences(sequences, tokens);

  std::int64_t max_keys = 0, covered = 0, pairs = 0;
  for (const AttentionSequence& s : sequences) {
    max_keys = std::max(max_keys, s.prefix_length + s.length);
    covered += s.length;
    pairs += attention_pairs(s.prefix_length, 0, s.length, shape.window);
  }
  if (covered < tokens) {
    out.zero_();
    if (lse.defined()) lse.zero_();
  }
  if (qkv.is_cuda()) return attention_forward_cuda.get(qkv)(qkv, sequences, shape, heads.sinks, out, lse);
  const kernels::AttentionForwardArgs args{
      shape,           qkv.const_data_ptr(),   sequences.data(),
      sinks_of(heads), out.mutable_data_ptr(), lse.defined() ? lse.mutable_data_ptr() : nullptr};
  const auto items = forward_items(sequences, shape);
  const std::size_t bytes = kernels::attention_forward_workspace(shape, max_keys);
  runtime::parallel_items(
      static_cast<std::int64_t>(items.size()), pairs * shape.num_heads * shape.head_dim * 2 > kAttentionSerialCost,
      [&](std::int64_t i) { kernels::attention_forward_item(args, items[i], runtime::thread_workspace(bytes)); });
}

at::Tensor kv_cache_allocate(std::int64_t num_blocks, const AttentionHeads& heads, at::ScalarType dtype,
                             at::Device device) {
  return runtime::empty_large({num_blocks, heads.num_kv_heads, 2, heads.head_dim * kKeyTile},
                              at::TensorOptions().dtype(dtype).device(device));
}

void attention_paged(const at::Tensor& qkv, std::span<const PagedSlice> slices, const AttentionHeads& heads,
                     at::Tensor& cache, at::Tensor& out) {
  check_cache(cache, attention_shape(qkv, heads), qkv.scalar_type(), qkv.device());
  PagedStep step(heads, qkv.device());
  step.set({slices.begin(), slices.end()}, {}, qkv.size(0), cache.size(0));
  attention_paged(qkv, step, heads, cache, out);
}

void attention_paged(const at::Tensor& qkv, const PagedStep& step, const AttentionHeads& heads, at::Tensor& cache,
                     at::Tensor& out, const at::Tensor& lse) {
  const kernels::AttentionShape shape = attention_shape(qkv, heads);
  check_cache(cache, shape, qkv.scalar_type(), qkv.device());
  NRL_CHECK_ARG(step.token_ids().size(0) == qkv.size(0) && step.num_blocks() <= cache.size(0), "attention: a step of ",
                step.token_ids().size(0), " rows over ", step.num_blocks(), " cache blocks, but qkv is ", qkv.sizes(),
                " and the cache has ", cache.size(0), " blocks");
  check_matrix("out", out, qkv.size(0), heads.num_heads * heads.head_dim, qkv.scalar_type(), qkv.device());
  if (lse.defined()) {
    NRL_CHECK_ARG(qkv.is_cpu(), "attention: over a cache on ", qkv.device().str(), " there is no lse");
    check_matrix("lse", lse, qkv.size(0), heads.num_heads, qkv.scalar_type() == at::kDouble ? at::kDouble : at::kFloat,
                 qkv.device());
  }
  if (qkv.is_cuda()) return attention_paged_cuda.get(qkv)(qkv, step.arrays(), shape, heads.sinks, cache, out);

  const auto slices = step.slices();
  std::int64_t cost = 0;
  for (const PagedSlice& s : slices) cost += paged_cost(s, shape) * shape.num_kv_heads;
  const PagedWork work = paged_work(slices, shape, cost);
  const kernels::PagedAttentionArgs args{shape,
                                         qkv.const_data_ptr(),
                                         slices.data(),
                                         sinks_of(heads),
                                         cache.mutable_data_ptr(),
                                         out.mutable_data_ptr(),
                                         lse.defined() ? lse.mutable_data_ptr() : nullptr};
  const std::size_t bytes = kernels::attention_paged_workspace(shape);
  const bool parallel = cost > kAttentionSerialCost;
  runtime::parallel_items(static_cast<std::int64_t>(work.split.size()), parallel, [&](std::int64_t i) {
    kernels::kv_cache_write_slice(shape, args.qkv, slices[work.split[i]], args.cache);
  });
  runtime::parallel_items(static_cast<std::int64_t>(work.items.size()), parallel, [&](std::int64_t i) {
    kernels::attention_paged_item(args, work.items[i], runtime::thread_workspace(bytes));
  });
}

void kv_cache_copy(at::Tensor& cache, std::int64_t from, std::int64_t to, std::int64_t length) {
  NRL_CHECK_ARG(cache.dim() == 4 && cache.size(3) % kKeyTile == 0,
                "kv_cache_copy: the cache must be [num_blocks, K, 2, H*", kKeyTile, "], got ", cache.sizes());
  const kernels::AttentionShape shape{cache.size(1), cache.size(1), cache.size(3) / kKeyTile, 1.0,
                                      element_type(cache.scalar_type())};
  check_cache(cache, shape, cache.scalar_type(), cache.device());
  const std::int64_t blocks = cache.size(0);
  NRL_CHECK_ARG(from >= 0 && from < blocks && to >= 0 && to < blocks && length >= 0 && length <= kKeyTile,
                "kv_cache_copy: ", length, " positions from block ", from, " to ", to, " of ", blocks, " blocks of ",
                kKeyTile);
  if (from != to && cache.is_cuda()) return kv_cache_copy_cuda.get(cache)(cache, shape, from, to, length);
  if (from != to) kernels::kv_cache_copy_block(shape, cache.mutable_data_ptr(), from, to, length);
}

}  // namespace nemo_rl::ops
