#include "kernels/swiglu.h"

#include <cstring>

#include "kernels/cpu/swiglu_lanes.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// The slope of z.
template <Gate G, class Real, class V>
NRL_VEC V gate_slope(V x) {
  if constexpr (G == Gate::clamped) return V(static_cast<Real>(kClampedSlope));
  return x * x * static_cast<Real>(3 * kGeluCubic * kGeluScale) + static_cast<Real>(kGeluScale);
}

/// d where the clamped activation does not hold x back, else 0.
NRL_VEC double where_free(double x, double d, bool is_gate) {
  return x > kClampedLimit || (!is_gate && x < -kClampedLimit) ? 0.0 : d;
}
NRL_VEC Floats where_free(Floats x, Floats d, bool is_gate) {
  const Floats limit(static_cast<float>(kClampedLimit)), zero(0.0f);
  d = select(limit < x, zero, d);
  return is_gate ? d : select(x < zero - limit, zero, d);
}

template <class T>
NRL_VEC void backward_clamped(const T* d_act, const T* gate, const T* up, T* d_gate, T* d_up) {
  constexpr Gate G = Gate::clamped;
  const Floats x = load<Floats>(gate), u = load<Floats>(up), d = load<Floats>(d_act), g = gate_value<G, float>(x),
               s = sigmoid(gate_argument<G, float>(g));
  const Floats rest = g * (1.0f - s) * static_cast<float>(kClampedSlope);
  store(d_gate, where_free(x, d * up_factor<G, float>(u) * s * (1.0f + rest), /*is_gate=*/true));
  store(d_up, where_free(u, d * g * s, /*is_gate=*/false));
}

template <Gate G, class T>
NRL_VEC void backward_lanes(const T* d_act, const T* gate, const T* up, T* d_gate, T* d_up) {
  if constexpr (G == Gate::clamped) return backward_clamped(d_act, gate, up, d_gate, d_up);
  Floats g = load<Floats>(gate), s = sigmoid(gate_argument<G, float>(g));
  Floats rest = g * (1.0f - s);
  if constexpr (G != Gate::silu) rest = rest * gate_slope<G, float>(g);
  Floats d = load<Floats>(d_act), u = load<Floats>(up);  // not before: the exponential needs the registers
  store(d_gate, d * u * s * (1.0f + rest));
  store(d_up, d * g * s);
}
template <Gate G>
NRL_VEC void backward_lanes(const double* d_act, const double* gate, const double* up, double* d_gate, double* d_up) {
  double s[kLanes];
  for (int k = 0; k < kLanes; ++k) s[k] = gate_argument<G, double>(gate_value<G, double>(gate[k]));
  sigmoids(s, s);
  for (int k = 0; k < kLanes; ++k) {
    const double x = gate[k], u = up[k], d = d_act[k];  // d_gate and d_up may be gate and up
    const double g = gate_value<G, double>(x);
    double rest = g * (1.0 - s[k]);
    if constexpr (G != Gate::silu) rest = rest * gate_slope<G, double>(g);
    d_gate[k] = d * up_factor<G, double>(u) * s[k] * (1.0 + rest);
    d_up[k] = d * g * s[k];
    if constexpr (G == Gate::clamped)
      d_gate[k] = where_free(x, d_gate[k], true), d_up[k] = where_free(u, d_up[k], false);
  }
}

/// The last n < kLanes values, padded with zeros.
template <class T>
struct Padded {
  Padded(const T* x, std::int64_t n) { std::memcpy(v, x, static_cast<std::size_t>(n) * sizeof(T)); }
  T v[kLanes] = {};
};

template <Gate G, class T>
void forward(const T* gate_up, T* act, std::int64_t I, std::int64_t begin, std::int64_t end) {
  for (std::int64_t t = begin; t < end; ++t) {
    const T *gate = gate_up + t * 2 * I, *up = gate + I;
    T* const out = act + t * I;
    std::int64_t i = 0;
    for (; i + kLanes <= I; i += kLanes) forward_lanes<G>(gate + i, up + i, out + i);
    if (i == I) continue;
    T last[kLanes];
    forward_lanes<G>(Padded<T>(gate + i, I - i).v, Padded<T>(up + i, I - i).v, last);
    std::memcpy(out + i, last, static_cast<std::size_t>(I - i) * sizeof(T));
  }
}

template <Gate G, class T>
void backward(const T* d_act, const T* gate_up, T* d_gate_up, std::int64_t I, std::int64_t begin, std::int64_t end) {
  for (std::int64_t t = begin; t < end; ++t) {
    const T *d = d_act + t * I, *gate = gate_up + t * 2 * I, *up = gate + I;
    T *const d_gate = d_gate_up + t * 2 * I, *const d_up = d_gate + I;
    std::int64_t i = 0;
    for (; i + kLanes <= I; i += kLanes) backward_lanes<G>(d + i, gate + i, up + i, d_gate + i, d_up + i);
    if (i == I) continue;
    T last_gate[kLanes], last_up[kLanes];
    backward_lanes<G>(Padded<T>(d + i, I - i).v, Padded<T>(gate + i, I - i).v, Padded<T>(up + i, I - i).v, last_gate,
                      last_up);
    std::memcpy(d_gate + i, last_gate, static_cast<std::size_t>(I - i) * sizeof(T));
    std::memcpy(d_up + i, last_up, static_cast<std::size_t>(I - i) * sizeof(T));
  }
}

template <class T>
void forward_of(Gate gate, const T* gate_up, T* act, std::int64_t I, std::int64_t begin, std::int64_t end) {
  if (gate == Gate::silu) forward<Gate::silu>(gate_up, act, I, begin, end);
  else if (gate == Gate::gelu_tanh) forward<Gate::gelu_tanh>(gate_up, act, I, begin, end);
  else forward<Gate::clamped>(gate_up, act, I, begin, end);
}

template <class T>
void backward_of(Gate gate, const T* d_act, const T* gate_up, T* d_gate_up, std::int64_t I, std::int64_t begin,
                 std::int64_t end) {
  if (gate == Gate::silu) backward<Gate::silu>(d_act, gate_up, d_gate_up, I, begin, end);
  else if (gate == Gate::gelu_tanh) backward<Gate::gelu_tanh>(d_act, gate_up, d_gate_up, I, begin, end);
  else backward<Gate::clamped>(d_act, gate_up, d_gate_up, I, begin, end);
}

}  // namespace

void swiglu_forward_f32(const float* g, float* a, std::int64_t I, Gate f, std::int64_t b, std::int64_t e) {
  forward_of(f, g, a, I, b, e);
}
void swiglu_forward_f64(const double* g, double* a, std::int64_t I, Gate f, std::int64_t b, std::int64_t e) {
  forward_of(f, g, a, I, b, e);
}
void swiglu_forward_bf16(const bfloat16* g, bfloat16* a, std::int64_t I, Gate f, std::int64_t b, std::int64_t e) {
  forward_of(f, g, a, I, b, e);
}
void swiglu_backward_f32(const float* d, const float* g, float* o, std::int64_t I, Gate f, std::int64_t b,
                         std::int64_t e) {
  backward_of(f, d, g, o, I, b, e);
}
void swiglu_backward_f64(const double* d, const double* g, double* o, std::int64_t I, Gate f, std::int64_t b,
                         std::int64_t e) {
  backward_of(f, d, g, o, I, b, e);
}
void swiglu_backward_bf16(const bfloat16* d, const bfloat16* g, bfloat16* o, std::int64_t I, Gate f, std::int64_t b,
                          std::int64_t e) {
  backward_of(f, d, g, o, I, b, e);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
