// Writing and copying blocks of the KV cache where tiles multiply bfloat16: such blocks hold pairs.
#include <type_traits>

#include "kernels/cpu/attention_terms.h"
#include "kernels/cpu/kv_cache_write.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

template <class Elem>
using CacheOf = std::conditional_t<sizeof(Elem) == sizeof(bfloat16), PairCache, RowCache<Elem>>;

}  // namespace

void kv_cache_write_slice(const AttentionShape& shape, const void* qkv, const PagedSlice& slice, void* cache) {
  with_element(shape.type, [&](auto elem) { write_slice<CacheOf<decltype(elem)>>(shape, qkv, slice, cache); });
}

void kv_cache_copy_block(const AttentionShape& shape, void* cache, std::int64_t from, std::int64_t to,
                         std::int64_t length) {
  with_element(shape.type, [&](auto elem) { copy_block<CacheOf<decltype(elem)>>(shape, cache, from, to, length); });
}

}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
