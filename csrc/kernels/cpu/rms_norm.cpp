#include "kernels/rms_norm.h"

#include <cmath>

#include "kernels/cpu/plain.h"
#include "kernels/cpu/vec.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class X, class T>
void forward(const RmsNormForwardArgs<X, T>& p, std::int64_t begin, std::int64_t end) {
  using A = accumulate_t<T>;
  using V = ShortVec<T>;
  constexpr int L = V::kLanes;
  const A offset = static_cast<A>(p.offset);
  for (std::int64_t o = begin; o < end; ++o)
    for (std::int64_t i = 0; i < p.inner; ++i) {
      const X* x = p.x + o * p.stride_x + i * p.D;
      T* y = p.y + o * p.stride_y + i * p.D;
      V acc{};
      std::int64_t d = 0;
      for (; d + L <= p.D; d += L) {
        V v = load<V>(x + d);
        acc = mul_add(v, v, acc);
      }
      if (d < p.D) {
        V v = load<V>(x + d, static_cast<int>(p.D - d));
        acc = mul_add(v, v, acc);
      }
      const A rstd = A(1) / std::sqrt(sum_of(acc) / static_cast<A>(p.D) + static_cast<A>(p.eps));
      if (p.rstd) p.rstd[o * p.inner + i] = rstd;
      for (std::int64_t k = 0; k < p.D; ++k)
        y[k] = static_cast<T>(static_cast<A>(x[k]) * rstd * (offset + static_cast<A>(p.w[k])));
    }
}

template <class X, class G, class T>
void backward(const RmsNormBackwardArgs<X, G, T>& p, std::int64_t begin, std::int64_t end, accumulate_t<T>* dw) {
  using A = accumulate_t<T>;
  const A offset = static_cast<A>(p.offset);
  fill(dw, p.D, A(0));
  for (std::int64_t o = begin; o < end; ++o)
    for (std::int64_t i = 0; i < p.inner; ++i) {
      const G* dy = p.dy + o * p.stride_dy + i * p.D;
      const X* x = p.x + o * p.stride_x + i * p.D;
      X* dx = p.dx + o * p.stride_dx + i * p.D;
      const A rstd = p.rstd[o * p.inner + i];
      constexpr int kParts = 8;  // independent partial sums, added in order
      A parts[kParts] = {};
      std::int64_t d = 0;
      for (; d + kParts <= p.D; d += kParts)
        for (int k = 0; k < kParts; ++k)
          parts[k] += (offset + static_cast<A>(p.w[d + k])) * static_cast<A>(dy[d + k]) * static_cast<A>(x[d + k]);
      for (; d < p.D; ++d) parts[0] += (offset + static_cast<A>(p.w[d])) * static_cast<A>(dy[d]) * static_cast<A>(x[d]);
      A dot = 0;
      for (A part : parts) dot += part;
      const A scale = dot * rstd * rstd * rstd / static_cast<A>(p.D);
      for (std::int64_t k = 0; k < p.D; ++k) {
        const A g = static_cast<A>(dy[k]), v = static_cast<A>(x[k]);
        dw[k] += g * v * rstd;
        const A value = rstd * (offset + static_cast<A>(p.w[k])) * g - scale * v;
        dx[k] = static_cast<X>(p.accumulate ? static_cast<A>(dx[k]) + value : value);
      }
    }
}

}  // namespace

void rms_norm_forward_f32(const RmsNormForwardArgs<float, float>& p, std::int64_t b, std::int64_t e) {
  forward(p, b, e);
}
void rms_norm_forward_f64(const RmsNormForwardArgs<double, double>& p, std::int64_t b, std::int64_t e) {
  forward(p, b, e);
}
void rms_norm_forward_f32_bf16(const RmsNormForwardArgs<float, bfloat16>& p, std::int64_t b, std::int64_t e) {
  forward(p, b, e);
}
void rms_norm_forward_bf16(const RmsNormForwardArgs<bfloat16, bfloat16>& p, std::int64_t b, std::int64_t e) {
  forward(p, b, e);
}

void rms_norm_backward_f32(const RmsNormBackwardArgs<float, float, float>& p, std::int64_t b, std::int64_t e,
                           float* dw) {
  backward(p, b, e, dw);
}
void rms_norm_backward_f64(const RmsNormBackwardArgs<double, double, double>& p, std::int64_t b, std::int64_t e,
                           double* dw) {
  backward(p, b, e, dw);
}
void rms_norm_backward_f32_bf16(const RmsNormBackwardArgs<float, float, bfloat16>& p, std::int64_t b, std::int64_t e,
                                float* dw) {
  backward(p, b, e, dw);
}
void rms_norm_backward_bf16(const RmsNormBackwardArgs<bfloat16, bfloat16, bfloat16>& p, std::int64_t b, std::int64_t e,
                            float* dw) {
  backward(p, b, e, dw);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
