#include "kernels/adamw.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class A, class M, class V>
void adamw(const AdamWArgs<A, M, V>& p, std::int64_t begin, std::int64_t end) {
  const AdamWConstants<A> c = adamw_constants(p);
  A* __restrict w = p.weights;
  const A* __restrict grads = p.grads;
  M* __restrict exp_avg = p.exp_avg;
  V* __restrict exp_avg_sq = p.exp_avg_sq;
  for (std::int64_t i = begin; i < end; ++i) {
    A m = static_cast<A>(exp_avg[i]), v = static_cast<A>(exp_avg_sq[i]);
    adamw_update(c, grads[i], w[i], m, v);
    const std::uint32_t draw = adamw_draw(p.first + i, p.step);
    exp_avg[i] = keep_moment<M>(m, draw & 0xffffu);
    exp_avg_sq[i] = keep_moment<V>(v, draw >> 16);
  }
  if (p.compute)
    for (std::int64_t i = begin; i < end; ++i) p.compute[i] = bfloat16(static_cast<float>(w[i]));
}

template <class A>
double sum_of_squares(const A* x, std::int64_t n) {
  constexpr int kParts = 16;
  double parts[kParts] = {};
  std::int64_t i = 0;
  for (; i + kParts <= n; i += kParts)
    for (int k = 0; k < kParts; ++k) parts[k] += static_cast<double>(x[i + k]) * static_cast<double>(x[i + k]);
  for (; i < n; ++i) parts[0] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  double sum = 0;
  for (double part : parts) sum += part;
  return sum;
}

}  // namespace

void adamw_f32(const AdamWArgs<float>& p, std::int64_t b, std::int64_t e) { adamw(p, b, e); }
void adamw_f64(const AdamWArgs<double>& p, std::int64_t b, std::int64_t e) { adamw(p, b, e); }
void adamw_f32_bf16_bf16(const AdamWArgs<float, bfloat16, bfloat16>& p, std::int64_t b, std::int64_t e) {
  adamw(p, b, e);
}
void adamw_f32_bf16_f32(const AdamWArgs<float, bfloat16, float>& p, std::int64_t b, std::int64_t e) { adamw(p, b, e); }
void adamw_f32_f32_bf16(const AdamWArgs<float, float, bfloat16>& p, std::int64_t b, std::int64_t e) { adamw(p, b, e); }
double sum_of_squares_f32(const float* x, std::int64_t n) { return sum_of_squares(x, n); }
double sum_of_squares_f64(const double* x, std::int64_t n) { return sum_of_squares(x, n); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
