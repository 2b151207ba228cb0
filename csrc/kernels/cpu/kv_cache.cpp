// Writing and copying blocks of the KV cache. Only moves bits: the element type matters by its size.
#include "kernels/cpu/attention_terms.h"
#include "kernels/cpu/kv_cache_write.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

template <class Elem>
void write_slice(const AttentionShape& shape, const void* qkv, const PagedSlice& slice, void* cache) {
  for (std::int64_t head = 0; head < shape.num_kv_heads; ++head)
    write_head(shape, static_cast<const Elem*>(qkv), slice, head, static_cast<Elem*>(cache));
}

template <class Elem>
void copy_block(const AttentionShape& shape, void* cache, std::int64_t from, std::int64_t to, std::int64_t length) {
  const std::int64_t head_dim = shape.head_dim, tile_size = head_dim * kKeyTile;
  const Elem* source = static_cast<const Elem*>(cache) + from * shape.num_kv_heads * 2 * tile_size;
  Elem* target = static_cast<Elem*>(cache) + to * shape.num_kv_heads * 2 * tile_size;
  for (std::int64_t head = 0; head < shape.num_kv_heads; ++head, source += 2 * tile_size, target += 2 * tile_size) {
    for (std::int64_t h = 0; h < head_dim; ++h)
      __builtin_memcpy(target + h * kKeyTile, source + h * kKeyTile, length * sizeof(Elem));
    __builtin_memcpy(target + tile_size, source + tile_size, length * head_dim * sizeof(Elem));
  }
}

}  // namespace

void kv_cache_write_slice(const AttentionShape& shape, const void* qkv, const PagedSlice& slice, void* cache) {
  with_element(shape.type, [&](auto elem) { write_slice<decltype(elem)>(shape, qkv, slice, cache); });
}

void kv_cache_copy_block(const AttentionShape& shape, void* cache, std::int64_t from, std::int64_t to,
                         std::int64_t length) {
  with_element(shape.type, [&](auto elem) { copy_block<decltype(elem)>(shape, cache, from, to, length); });
}

}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
