// Attention's forward where tiles multiply bfloat16; other types take the vectors of the same capability.
#include <type_traits>

#include "kernels/cpu/attention_forward_item.h"
#include "kernels/tiles/attention_tiles.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

template <class Elem>
using RowsOf = std::conditional_t<sizeof(Elem) == sizeof(bfloat16), TileRows, QueryRows<Elem>>;

}  // namespace

std::size_t attention_forward_workspace(const AttentionShape& shape, std::int64_t max_keys) {
  return with_element(shape.type, [&](auto elem) { return forward_bytes<RowsOf<decltype(elem)>>(shape, max_keys); });
}

void attention_forward_item(const AttentionForwardArgs& args, const AttentionItem& item, std::byte* workspace) {
  with_element(args.shape.type, [&](auto elem) { forward_item<RowsOf<decltype(elem)>>(args, item, workspace); });
}

std::size_t attention_paged_workspace(const AttentionShape& shape) {
  return with_element(shape.type, [&](auto elem) { return query_rows_bytes<RowsOf<decltype(elem)>>(shape); });
}

void attention_paged_item(const PagedAttentionArgs& args, const PagedItem& item, std::byte* workspace) {
  with_element(args.shape.type, [&](auto elem) { paged_item<RowsOf<decltype(elem)>>(args, item, workspace); });
}

}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
