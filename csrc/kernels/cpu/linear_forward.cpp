// y (+)= x · w^T (+ bias), tile by tile; the arithmetic is in linear_panel.h, of many rows in linear_wide.h, of few
// with packed weights in packed_strip.h.
#include "kernels/cpu/linear_store.h"
#include "kernels/cpu/linear_wide.h"
#include "kernels/cpu/packed_strip.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T, class O>
void linear_forward_wide(const LinearForwardArgs<T, O>& p, const LinearWideTile& tile) {
  run_wide<1>(p.input, tile, [&](std::int64_t strip) { return store_strip(p, strip); });
}

}  // namespace

void linear_forward_f32(const LinearForwardArgs<float, float>& p, std::int64_t b, std::int64_t e, bool more) {
  run_columns(p, p.input, b, e, more);
}
void linear_forward_f64(const LinearForwardArgs<double, double>& p, std::int64_t b, std::int64_t e, bool more) {
  run_columns(p, p.input, b, e, more);
}
void linear_forward_bf16(const LinearForwardArgs<bfloat16, bfloat16>& p, std::int64_t b, std::int64_t e, bool more) {
  run_columns(p, p.input, b, e, more);
}
void linear_forward_bf16_f32(const LinearForwardArgs<bfloat16, float>& p, std::int64_t b, std::int64_t e, bool more) {
  run_columns(p, p.input, b, e, more);
}
void linear_forward_wide_f32(const LinearForwardArgs<float, float>& p, const LinearWideTile& t) {
  linear_forward_wide(p, t);
}
void linear_forward_wide_bf16(const LinearForwardArgs<bfloat16, bfloat16>& p, const LinearWideTile& t) {
  linear_forward_wide(p, t);
}
void linear_forward_wide_bf16_f32(const LinearForwardArgs<bfloat16, float>& p, const LinearWideTile& t) {
  linear_forward_wide(p, t);
}
void packed_weights_forward_bf16(const LinearForwardArgs<bfloat16, bfloat16>& p, const PackedMatrix& w, std::int64_t b,
                                 std::int64_t e) {
  packed_weights_forward<PackedChains>(p, w, b, e);
}
void packed_weights_forward_bf16_f32(const LinearForwardArgs<bfloat16, float>& p, const PackedMatrix& w, std::int64_t b,
                                     std::int64_t e) {
  packed_weights_forward<PackedChains>(p, w, b, e);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
