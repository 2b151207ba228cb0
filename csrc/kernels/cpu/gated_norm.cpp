#include "kernels/gated_norm.h"

#include <cmath>

#include "kernels/cpu/plain.h"
#include "kernels/cpu/wide_lanes.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T>
NRL_VEC accumulate_t<T> reciprocal_rms(accumulate_t<T> sum_of_squares, const GatedNormArgs<T>& p) {
  using A = accumulate_t<T>;
  return A(1) / std::sqrt(sum_of_squares / static_cast<A>(p.D) + static_cast<A>(p.eps));
}

/// x · silu(z) of 16 numbers.
template <class T>
NRL_VEC Wide<T> gated(const T* x, const T* z) {
  Wide<T> gate = load<Wide<T>>(z);
  return load<Wide<T>>(x) * (gate * sigmoid_of(gate));
}

/// rstd of one head.
template <bool kGateFirst, class T>
NRL_VEC accumulate_t<T> reciprocal_rms(const T* x, const T* z, const GatedNormArgs<T>& p) {
  if constexpr (!kGateFirst) return reciprocal_rms(sum_of_squares(x, p.D), p);
  Wide<T> sum{};
  for (std::int64_t d = 0; d < p.D; d += 16) {
    Wide<T> g = gated(x + d, z + d);
    sum = mul_add(g, g, sum);
  }
  return reciprocal_rms(sum_of(sum), p);
}

template <bool kGateFirst, class T>
void forward(const GatedNormArgs<T>& p, T* y, std::int64_t stride_y, std::int64_t begin, std::int64_t end) {
  using V = Wide<T>;
  for (std::int64_t row = begin; row < end; ++row)
    for (std::int64_t head = 0; head < p.heads; ++head) {
      const T *x = p.x + row * p.stride_x + head * p.D, *z = p.z + row * p.stride_z + head * p.D;
      const T* const w = p.w + (kGateFirst ? head * p.D : 0);
      T* const out = y + row * stride_y + head * p.D;
      const auto rstd = reciprocal_rms<kGateFirst>(x, z, p);
      for (std::int64_t d = 0; d < p.D; d += 16) {
        if constexpr (kGateFirst) {
          store(out + d, gated(x + d, z + d) * rstd * load<V>(w + d));
        } else {
          V gate = load<V>(z + d);
          store(out + d, load<V>(x + d) * rstd * load<V>(w + d) * (gate * sigmoid_of(gate)));
        }
      }
    }
}

template <class T>
void forward_of(const GatedNormArgs<T>& p, T* y, std::int64_t stride_y, std::int64_t begin, std::int64_t end) {
  if (p.gate_first) forward<true>(p, y, stride_y, begin, end);
  else forward<false>(p, y, stride_y, begin, end);
}

/// One head of D numbers; dw [D] += its share.
template <class T>
void backward_head(const T* dy, const T* x, const T* z, const GatedNormArgs<T>& p, T* dx, T* dz, accumulate_t<T>* dw) {
  using A = accumulate_t<T>;
  using V = Wide<T>;
  const A rstd = reciprocal_rms<false>(x, z, p);
  V products{};
  for (std::int64_t d = 0; d < p.D; d += 16) {
    V gate = load<V>(z + d), s = sigmoid_of(gate);
    V value = load<V>(x + d), normed = value * rstd, grad = load<V>(dy + d), w = load<V>(p.w + d);
    V d_scaled = grad * (gate * s);
    store(dz + d, grad * w * normed * (s * (gate * (A(1) - s) + A(1))));
    store(dw + d, mul_add(d_scaled, normed, load<V>(dw + d)));
    products = mul_add(d_scaled * w, value, products);
  }
  const A along = sum_of(products) * rstd * rstd / static_cast<A>(p.D);
  for (std::int64_t d = 0; d < p.D; d += 16) {
    V gate = load<V>(z + d);
    V d_normed = load<V>(dy + d) * (gate * sigmoid_of(gate)) * load<V>(p.w + d);
    store(dx + d, (d_normed - load<V>(x + d) * along) * rstd);
  }
}

/// The same with the gate first; w [D] are the head's weights.
template <class T>
void backward_gated_head(const T* dy, const T* x, const T* z, const T* w, const GatedNormArgs<T>& p, T* dx, T* dz,
                         accumulate_t<T>* dw) {
  using A = accumulate_t<T>;
  using V = Wide<T>;
  const A rstd = reciprocal_rms<true>(x, z, p);
  V products{};
  for (std::int64_t d = 0; d < p.D; d += 16) {
    V g = gated(x + d, z + d), grad = load<V>(dy + d);
    store(dw + d, mul_add(grad, g * rstd, load<V>(dw + d)));
    products = mul_add(grad * load<V>(w + d), g, products);
  }
  const A along = sum_of(products) * rstd * rstd / static_cast<A>(p.D);
  for (std::int64_t d = 0; d < p.D; d += 16) {
    V gate = load<V>(z + d), s = sigmoid_of(gate), value = load<V>(x + d);
    V d_gated = (load<V>(dy + d) * load<V>(w + d) - value * (gate * s) * along) * rstd;
    store(dz + d, d_gated * value * (s * (gate * (A(1) - s) + A(1))));
    store(dx + d, d_gated * (gate * s));
  }
}

template <class T>
void backward(const GatedNormArgs<T>& p, const GatedNormGradients<T>& g, std::int64_t begin, std::int64_t end,
              accumulate_t<T>* dw) {
  fill(dw, p.gate_first ? p.heads * p.D : p.D, accumulate_t<T>(0));
  for (std::int64_t row = begin; row < end; ++row)
    for (std::int64_t head = 0; head < p.heads; ++head) {
      const std::int64_t column = head * p.D;
      const T *x = p.x + row * p.stride_x + column, *z = p.z + row * p.stride_z + column;
      const T* dy = g.dy + row * g.stride_dy + column;
      T *dx = g.dx + row * g.stride_dx + column, *dz = g.dz + row * g.stride_dz + column;
      if (p.gate_first) backward_gated_head(dy, x, z, p.w + column, p, dx, dz, dw + column);
      else backward_head(dy, x, z, p, dx, dz, dw);
    }
}

/// Calls f(the head's places, how many lanes) for sixteen numbers of a head at a time.
template <class T, class F>
NRL_VEC void over_heads(const HeadGateArgs<T>& p, std::int64_t begin, std::int64_t end, const F& f) {
  for (std::int64_t row = begin; row < end; ++row)
    for (std::int64_t head = 0; head < p.heads; ++head)
      for (std::int64_t d = 0; d < p.D; d += 16)
        f((row * p.heads + head) * p.D + d, row * p.stride_g + head * p.head_stride_g + d,
          static_cast<int>(smaller<std::int64_t>(16, p.D - d)));
}

template <class T>
void gate_forward(const HeadGateArgs<T>& p, T* y, std::int64_t begin, std::int64_t end) {
  using V = Wide<T>;
  over_heads(p, begin, end, [&](std::int64_t at, std::int64_t gate, int n) __attribute__((always_inline)) {
    store(y + at, load<V>(p.x + at, n) * sigmoid_of(load<V>(p.g + gate, n)), n);
  });
}

template <class T>
void gate_backward(const HeadGateArgs<T>& p, const T* dy, T* dx, T* dg, std::int64_t begin, std::int64_t end) {
  using A = accumulate_t<T>;
  using V = Wide<T>;
  over_heads(p, begin, end, [&](std::int64_t at, std::int64_t gate, int n) __attribute__((always_inline)) {
    V s = sigmoid_of(load<V>(p.g + gate, n)), d = load<V>(dy + at, n);
    store(dg + gate, d * load<V>(p.x + at, n) * (s * (A(1) - s)), n);
    store(dx + at, d * s, n);
  });
}

}  // namespace

void gated_norm_forward_f32(const GatedNormArgs<float>& p, float* y, std::int64_t stride, std::int64_t b,
                            std::int64_t e) {
  forward_of(p, y, stride, b, e);
}
void gated_norm_forward_f64(const GatedNormArgs<double>& p, double* y, std::int64_t stride, std::int64_t b,
                            std::int64_t e) {
  forward_of(p, y, stride, b, e);
}
void gated_norm_forward_bf16(const GatedNormArgs<bfloat16>& p, bfloat16* y, std::int64_t stride, std::int64_t b,
                             std::int64_t e) {
  forward_of(p, y, stride, b, e);
}

void gated_norm_backward_f32(const GatedNormArgs<float>& p, const GatedNormGradients<float>& g, std::int64_t b,
                             std::int64_t e, float* dw) {
  backward(p, g, b, e, dw);
}
void gated_norm_backward_f64(const GatedNormArgs<double>& p, const GatedNormGradients<double>& g, std::int64_t b,
                             std::int64_t e, double* dw) {
  backward(p, g, b, e, dw);
}
void gated_norm_backward_bf16(const GatedNormArgs<bfloat16>& p, const GatedNormGradients<bfloat16>& g, std::int64_t b,
                              std::int64_t e, float* dw) {
  backward(p, g, b, e, dw);
}

void head_gate_forward_f32(const HeadGateArgs<float>& p, float* y, std::int64_t b, std::int64_t e) {
  gate_forward(p, y, b, e);
}
void head_gate_forward_f64(const HeadGateArgs<double>& p, double* y, std::int64_t b, std::int64_t e) {
  gate_forward(p, y, b, e);
}
void head_gate_forward_bf16(const HeadGateArgs<bfloat16>& p, bfloat16* y, std::int64_t b, std::int64_t e) {
  gate_forward(p, y, b, e);
}

void head_gate_backward_f32(const HeadGateArgs<float>& p, const float* dy, float* dx, float* dg, std::int64_t b,
                            std::int64_t e) {
  gate_backward(p, dy, dx, dg, b, e);
}
void head_gate_backward_f64(const HeadGateArgs<double>& p, const double* dy, double* dx, double* dg, std::int64_t b,
                            std::int64_t e) {
  gate_backward(p, dy, dx, dg, b, e);
}
void head_gate_backward_bf16(const HeadGateArgs<bfloat16>& p, const bfloat16* dy, bfloat16* dx, bfloat16* dg,
                             std::int64_t b, std::int64_t e) {
  gate_backward(p, dy, dx, dg, b, e);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
