#include "kernels/adamw.h"

#include <cmath>

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class A>
void adamw(const AdamWArgs<A>& p, std::int64_t begin, std::int64_t end) {
  const A decay = static_cast<A>(1.0 - p.lr * p.weight_decay), scale = static_cast<A>(p.grad_scale);
  const A beta1 = static_cast<A>(p.beta1), beta2 = static_cast<A>(p.beta2), eps = static_cast<A>(p.eps);
  const A one_minus_beta1 = static_cast<A>(1.0 - p.beta1), one_minus_beta2 = static_cast<A>(1.0 - p.beta2);
  const A step_size = static_cast<A>(p.lr / p.bias_correction1);
  const A sqrt_correction = static_cast<A>(std::sqrt(p.bias_correction2));
  A* __restrict w = p.weights;
  const A* __restrict grads = p.grads;
  A* __restrict m = p.exp_avg;
  A* __restrict v = p.exp_avg_sq;
  for (std::int64_t i = begin; i < end; ++i) {
    const A g = grads[i] * scale;
    m[i] = beta1 * m[i] + one_minus_beta1 * g;
    v[i] = beta2 * v[i] + one_minus_beta2 * g * g;
    w[i] = w[i] * decay - step_size * (m[i] / (std::sqrt(v[i]) / sqrt_correction + eps));
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
double sum_of_squares_f32(const float* x, std::int64_t n) { return sum_of_squares(x, n); }
double sum_of_squares_f64(const double* x, std::int64_t n) { return sum_of_squares(x, n); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
