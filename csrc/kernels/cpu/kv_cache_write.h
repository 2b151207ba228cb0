// New keys and values on their way into the blocks of the cache. Only moves bits.
#pragma once
#include "kernels/attention.h"
#include "kernels/cpu/plain.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

/// Stores the keys and values of one slice's new tokens, one kv head.
template <class Elem>
void write_head(const AttentionShape& shape, const Elem* qkv, const PagedSlice& slice, std::int64_t head, Elem* cache) {
  const std::int64_t head_dim = shape.head_dim, stride = shape.row_stride(), tile_size = head_dim * kKeyTile;
  const Elem* key = qkv + slice.query_start * stride + (shape.num_heads + head) * head_dim;
  const Elem* value = key + shape.num_kv_heads * head_dim;
  std::int64_t position = slice.context_length;
  const std::int64_t end = position + slice.query_length;
  while (position < end) {
    const std::int64_t lane = position % kKeyTile, n = smaller(kKeyTile - lane, end - position);
    const std::int64_t block = static_cast<std::int64_t>(slice.block_table[position / kKeyTile]) * shape.num_kv_heads;
    Elem* keys = cache + (block + head) * 2 * tile_size + lane;
    Elem* values = cache + ((block + head) * 2 + 1) * tile_size + lane * head_dim;
    for (std::int64_t h = 0; h < head_dim; ++h)
      for (std::int64_t i = 0; i < n; ++i) keys[h * kKeyTile + i] = key[i * stride + h];
    for (std::int64_t i = 0; i < n; ++i)
      __builtin_memcpy(values + i * head_dim, value + i * stride, head_dim * sizeof(Elem));
    position += n;
    key += n * stride;
    value += n * stride;
  }
}

}  // namespace
}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
