// Writing and copying blocks of the KV cache. Only moves bits: the element type matters by its size.
#include "kernels/cpu/attention_terms.h"
#include "kernels/cpu/kv_cache_write.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {

void kv_cache_write_slice(const AttentionShape& shape, const void* qkv, const PagedSlice& slice, void* cache) {
  with_element(shape.type, [&](auto elem) { write_slice<RowCache<decltype(elem)>>(shape, qkv, slice, cache); });
}

void kv_cache_copy_block(const AttentionShape& shape, void* cache, std::int64_t from, std::int64_t to,
                         std::int64_t length) {
  with_element(shape.type, [&](auto elem) { copy_block<RowCache<decltype(elem)>>(shape, cache, from, to, length); });
}

}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
