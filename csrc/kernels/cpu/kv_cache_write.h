// New keys and values on their way into the blocks of the cache. Only moves bits.
#pragma once
#include "kernels/attention.h"
#include "kernels/cpu/plain.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

/// Of every kv head in a block a tile of keys [H][kKeyTile], then one of values [kKeyTile][H].
template <class Element>
struct RowCache {
  using Elem = Element;
  static Elem& key(Elem* tile, std::int64_t h, std::int64_t lane) { return tile[h * kKeyTile + lane]; }
  static void put_value(const Elem* value, std::int64_t H, std::int64_t lane, Elem* tile) {
    __builtin_memcpy(tile + lane * H, value, H * sizeof(Elem));
  }
  /// Copies the first `length` positions of a head's tiles.
  static void copy_head(const Elem* from, std::int64_t H, std::int64_t length, Elem* to) {
    for (std::int64_t h = 0; h < H; ++h)
      __builtin_memcpy(to + h * kKeyTile, from + h * kKeyTile, length * sizeof(Elem));
    __builtin_memcpy(to + H * kKeyTile, from + H * kKeyTile, length * H * sizeof(Elem));
  }
};

/// The same tiles in pairs, as the instructions of tiles multiply them: of keys [H / 2][kKeyTile] pairs of terms of the
/// head, of values [kKeyTile / 2][H] pairs of positions. The earlier one is the lower half.
struct PairCache {
  using Elem = bfloat16;
  static Elem& key(Elem* tile, std::int64_t h, std::int64_t lane) {
    return tile[(h / 2 * kKeyTile + lane) * 2 + h % 2];
  }
  static void put_value(const Elem* value, std::int64_t H, std::int64_t lane, Elem* tile) {
    Elem* const to = tile + lane / 2 * 2 * H + lane % 2;
    for (std::int64_t h = 0; h < H; ++h) to[2 * h] = value[h];
  }
  static void copy_head(const Elem* from, std::int64_t H, std::int64_t length, Elem* to) {
    constexpr std::int64_t kPair = 2 * sizeof(Elem);
    for (std::int64_t h = 0; h < H * kKeyTile; h += 2 * kKeyTile) __builtin_memcpy(to + h, from + h, length * kPair);
    __builtin_memcpy(to + H * kKeyTile, from + H * kKeyTile, (length + 1) / 2 * H * kPair);
  }
};

/// Stores the keys and values of one slice's new tokens, one kv head.
template <class Cache>
void write_head(const AttentionShape& shape, const typename Cache::Elem* qkv, const PagedSlice& slice,
                std::int64_t head, typename Cache::Elem* cache) {
  const std::int64_t H = shape.head_dim, stride = shape.row_stride(), tile_size = H * kKeyTile;
  const auto* key = qkv + slice.query_start * stride + (shape.num_heads + head) * H;
  const auto* value = key + shape.num_kv_heads * H;
  std::int64_t position = slice.context_length;
  const std::int64_t end = position + slice.query_length;
  while (position < end) {
    const std::int64_t lane = position % kKeyTile, n = smaller(kKeyTile - lane, end - position);
    const std::int64_t block = static_cast<std::int64_t>(slice.block_table[position / kKeyTile]) * shape.num_kv_heads;
    auto* const keys = cache + (block + head) * 2 * tile_size;
    for (std::int64_t h = 0; h < H; ++h)
      for (std::int64_t i = 0; i < n; ++i) Cache::key(keys, h, lane + i) = key[i * stride + h];
    for (std::int64_t i = 0; i < n; ++i) Cache::put_value(value + i * stride, H, lane + i, keys + tile_size);
    position += n;
    key += n * stride;
    value += n * stride;
  }
}

template <class Cache>
void write_slice(const AttentionShape& shape, const void* qkv, const PagedSlice& slice, void* cache) {
  using Elem = typename Cache::Elem;
  for (std::int64_t head = 0; head < shape.num_kv_heads; ++head)
    write_head<Cache>(shape, static_cast<const Elem*>(qkv), slice, head, static_cast<Elem*>(cache));
}

template <class Cache>
void copy_block(const AttentionShape& shape, void* cache, std::int64_t from, std::int64_t to, std::int64_t length) {
  using Elem = typename Cache::Elem;
  const std::int64_t head_size = 2 * shape.head_dim * kKeyTile, block_size = shape.num_kv_heads * head_size;
  auto* const source = static_cast<Elem*>(cache) + from * block_size;
  auto* const target = static_cast<Elem*>(cache) + to * block_size;
  for (std::int64_t at = 0; at < block_size; at += head_size)
    Cache::copy_head(source + at, shape.head_dim, length, target + at);
}

}  // namespace
}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
