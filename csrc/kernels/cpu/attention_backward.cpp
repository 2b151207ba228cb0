#include "kernels/cpu/attention_backward_rows.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {

std::size_t attention_backward_workspace(const AttentionShape& shape, std::int64_t owner_keys,
                                         std::int64_t sharer_keys) {
  return with_element(shape.type, [&](auto elem) {
    return backward_bytes<BackwardRows<decltype(elem)>>(shape, owner_keys, sharer_keys);
  });
}

void attention_backward_job(const AttentionBackwardArgs& args, const AttentionBackwardJob& job, std::int64_t kv_head,
                            std::byte* workspace) {
  with_element(args.shape.type, [&](auto elem) {
    using Block = BackwardRows<decltype(elem)>;
    with_gradient<decltype(elem)>(args, [&](auto grad) {
      Job<Block, decltype(grad)>(args, kv_head, workspace).run(job, workspace + Block::bytes(args.shape));
    });
  });
}

void attention_backward_reduce(const AttentionBackwardArgs& args, const AttentionBackwardJob* jobs, std::int64_t count,
                               std::int64_t kv_head, std::int64_t key_begin, std::int64_t key_end) {
  with_element(args.shape.type, [&](auto elem) {
    with_gradient<decltype(elem)>(args, [&](auto grad) {
      reduce<BackwardRows<decltype(elem)>, decltype(grad)>(args, jobs, count, kv_head, key_begin, key_end);
    });
  });
}

}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
