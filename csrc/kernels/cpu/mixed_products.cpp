// x in bfloat16 times w in float32: packed rows of x are float32 in these capabilities, so the tiles are those of
// float32.
#include "kernels/cpu/linear_store.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

static_assert(std::is_same_v<Terms<bfloat16>::V, Terms<float>::V> && kPanelRows<bfloat16> == kPanelRows<float>);

template <class Args>
void run_mixed(const Args& p, std::int64_t begin, std::int64_t end, bool more) {
  run_columns(p, LinearInput<float>{nullptr, 0, p.input.M, p.input.K, p.input.packed}, begin, end, more);
}

}  // namespace

void linear_forward_mixed_bf16(const LinearForwardArgs<bfloat16, bfloat16, float>& p, std::int64_t b, std::int64_t e,
                               bool more) {
  run_mixed(p, b, e, more);
}
void linear_forward_mixed_bf16_f32(const LinearForwardArgs<bfloat16, float, float>& p, std::int64_t b, std::int64_t e,
                                   bool more) {
  run_mixed(p, b, e, more);
}
void linear_swiglu_mixed_bf16(const LinearSwigluArgs<bfloat16, float>& p, std::int64_t b, std::int64_t e, bool more) {
  run_mixed(p, b, e, more);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
