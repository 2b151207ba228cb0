#include "kernels/cpu/attention_forward_item.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {

std::size_t attention_forward_workspace(const AttentionShape& shape, std::int64_t max_keys) {
  return with_element(shape.type, [&](auto elem) { return forward_bytes<QueryRows<decltype(elem)>>(shape, max_keys); });
}

void attention_forward_item(const AttentionForwardArgs& args, const AttentionItem& item, std::byte* workspace) {
  with_element(args.shape.type, [&](auto elem) { forward_item<QueryRows<decltype(elem)>>(args, item, workspace); });
}

std::size_t attention_paged_workspace(const AttentionShape& shape) {
  return with_element(shape.type, [&](auto elem) { return query_rows_bytes<QueryRows<decltype(elem)>>(shape); });
}

void attention_paged_item(const PagedAttentionArgs& args, const PagedItem& item, std::byte* workspace) {
  with_element(args.shape.type, [&](auto elem) { paged_item<QueryRows<decltype(elem)>>(args, item, workspace); });
}

}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
