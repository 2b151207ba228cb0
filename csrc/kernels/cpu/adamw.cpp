#include "kernels/adamw.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// `w`: the weights from element `begin` on.
template <class A, class M, class V>
void update(const AdamWArgs<A, M, V>& p, A* __restrict w, std::int64_t begin, std::int64_t end) {
  const AdamWConstants<A> c = adamw_constants(p);
  const A* __restrict grads = p.grads;
  M* __restrict exp_avg = p.exp_avg;
  V* __restrict exp_avg_sq = p.exp_avg_sq;
  const std::int64_t first = p.first, step = p.step;
  for (std::int64_t i = begin; i < end; ++i) {
    A m, v;
    read_moments(exp_avg[i], exp_avg_sq[i], m, v);
    adamw_update(c, grads[i], w[i - begin], m, v);
    keep_moments(m, v, adamw_draw(first + i, step), exp_avg[i], exp_avg_sq[i]);
  }
}

template <class A, class M, class V>
void adamw(const AdamWArgs<A, M, V>& p, std::int64_t begin, std::int64_t end) {
  if constexpr (std::is_same_v<A, float>) {
    constexpr std::int64_t kJoined = 1024;
    float w[kJoined];
    for (std::int64_t i = begin; p.remainders && i < end; i += kJoined) {
      const std::int64_t n = end - i < kJoined ? end - i : kJoined;
      for (std::int64_t k = 0; k < n; ++k) w[k] = join_halves(p.compute[i + k], p.remainders[i + k]);
      update(p, w, i, i + n);
      for (std::int64_t k = 0; k < n; ++k) split_halves(w[k], p.compute[i + k], p.remainders[i + k]);
    }
    if (p.remainders) return;
  }
  const A* const w = p.weights;
  update(p, p.weights + begin, begin, end);
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
void adamw_f32_u8_u8(const AdamWArgs<float, std::uint8_t, std::uint8_t>& p, std::int64_t b, std::int64_t e) {
  adamw(p, b, e);
}
double sum_of_squares_f32(const float* x, std::int64_t n) { return sum_of_squares(x, n); }
double sum_of_squares_f64(const double* x, std::int64_t n) { return sum_of_squares(x, n); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
