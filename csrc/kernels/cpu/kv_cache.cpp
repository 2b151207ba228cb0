// Writing and copying blocks of the KV cache. Only moves bits: the element type matters by its size.
#include <cstring>

#include "kernels/attention.h"
#include "kernels/cpu/plain.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

template <class Elem>
void write_slice(const AttentionShape& shape, const Elem* qkv, const PagedSlice& slice, Elem* keys, Elem* values) {
  const std::int64_t head_dim = shape.head_dim, stride = shape.row_stride(), tile_size = head_dim * kKeyTile;
  std::int64_t position = slice.context_length;
  const std::int64_t end = position + slice.query_length;
  while (position < end) {
    const std::int64_t lane = position % kKeyTile, n = smaller(kKeyTile - lane, end - position);
    const std::int64_t block = static_cast<std::int64_t>(slice.block_table[position / kKeyTile]) * shape.num_kv_heads;
    const Elem* first = qkv + (slice.query_start + position - slice.context_length) * stride;
    for (std::int64_t head = 0; head < shape.num_kv_heads; ++head) {
      const Elem* key = first + (shape.num_heads + head) * head_dim;
      const Elem* value = key + shape.num_kv_heads * head_dim;
      Elem* key_tile = keys + (block + head) * tile_size + lane;
      Elem* value_tile = values + (block + head) * tile_size + lane * head_dim;
      for (std::int64_t h = 0; h < head_dim; ++h)
        for (std::int64_t i = 0; i < n; ++i) key_tile[h * kKeyTile + i] = key[i * stride + h];
      for (std::int64_t i = 0; i < n; ++i)
        std::memcpy(value_tile + i * head_dim, value + i * stride, head_dim * sizeof(Elem));
    }
    position += n;
  }
}

template <class Elem>
void copy_block(const AttentionShape& shape, Elem* keys, Elem* values, std::int64_t from, std::int64_t to,
                std::int64_t length) {
  const std::int64_t rows = shape.num_kv_heads * shape.head_dim, block_size = rows * kKeyTile;
  for (std::int64_t row = 0; row < rows; ++row)
    std::memcpy(keys + to * block_size + row * kKeyTile, keys + from * block_size + row * kKeyTile,
                length * sizeof(Elem));
  const std::int64_t tile_size = shape.head_dim * kKeyTile;
  for (std::int64_t head = 0; head < shape.num_kv_heads; ++head)
    std::memcpy(values + to * block_size + head * tile_size, values + from * block_size + head * tile_size,
                length * shape.head_dim * sizeof(Elem));
}

}  // namespace

void kv_cache_write_slice(const AttentionShape& shape, const void* qkv, const PagedSlice& slice, void* keys,
                          void* values) {
  switch (shape.type) {
    case ElementType::float32:
      return write_slice(shape, static_cast<const float*>(qkv), slice, static_cast<float*>(keys),
                         static_cast<float*>(values));
    case ElementType::bfloat16:
      return write_slice(shape, static_cast<const std::uint16_t*>(qkv), slice, static_cast<std::uint16_t*>(keys),
                         static_cast<std::uint16_t*>(values));
    case ElementType::float64:
      return write_slice(shape, static_cast<const double*>(qkv), slice, static_cast<double*>(keys),
                         static_cast<double*>(values));
  }
}

void kv_cache_copy_block(const AttentionShape& shape, void* keys, void* values, std::int64_t from, std::int64_t to,
                         std::int64_t length) {
  switch (shape.type) {
    case ElementType::float32:
      return copy_block(shape, static_cast<float*>(keys), static_cast<float*>(values), from, to, length);
    case ElementType::bfloat16:
      return copy_block(shape, static_cast<std::uint16_t*>(keys), static_cast<std::uint16_t*>(values), from, to,
                        length);
    case ElementType::float64:
      return copy_block(shape, static_cast<double*>(keys), static_cast<double*>(values), from, to, length);
  }
}

}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
