// The gated product: act = f(x · w_gate^T) · (x · w_up^T), f silu or gelu by tanh. A tile holds as many gates as ups,
// so that the activation is computed while both are at hand. The same operations as linear_forward followed by
// swiglu_forward: the same bits.
#include "kernels/cpu/linear_store.h"
#include "kernels/cpu/linear_wide.h"
#include "kernels/cpu/packed_strip.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T>
void linear_swiglu_wide(const LinearSwigluArgs<T>& p, const LinearWideTile& tile) {
  run_wide<2>(p.input, tile, [&](std::int64_t strip) { return store_strip(p, strip); });
}

}  // namespace

void linear_swiglu_f32(const LinearSwigluArgs<float>& p, std::int64_t b, std::int64_t e, bool more) {
  run_columns(p, p.input, b, e, more);
}
void linear_swiglu_f64(const LinearSwigluArgs<double>& p, std::int64_t b, std::int64_t e, bool more) {
  run_columns(p, p.input, b, e, more);
}
void linear_swiglu_bf16(const LinearSwigluArgs<bfloat16>& p, std::int64_t b, std::int64_t e, bool more) {
  run_columns(p, p.input, b, e, more);
}
void linear_swiglu_wide_f32(const LinearSwigluArgs<float>& p, const LinearWideTile& t) { linear_swiglu_wide(p, t); }
void linear_swiglu_wide_bf16(const LinearSwigluArgs<bfloat16>& p, const LinearWideTile& t) { linear_swiglu_wide(p, t); }
void packed_weights_swiglu_bf16(const LinearSwigluArgs<bfloat16>& p, const PackedMatrix& w, std::int64_t b,
                                std::int64_t e) {
  packed_weights_swiglu<PackedChains>(p, w, b, e);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
