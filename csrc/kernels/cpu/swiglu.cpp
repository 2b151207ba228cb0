#include "kernels/swiglu.h"

#include <cmath>
#include <cstring>

#include "kernels/cpu/vec_math.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// sigmoid of kLanes values into out.
template <class T>
NRL_VEC_INLINE void sigmoids(const T* x, float* out) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(x[i]);
  store16(out, sigmoid16(load16(lanes)));
}
NRL_VEC_INLINE void sigmoids(const float* x, float* out) { store16(out, sigmoid16(load16(x))); }
NRL_VEC_INLINE void sigmoids(const double* x, double* out) {
  for (int i = 0; i < kLanes; ++i) out[i] = 1.0 / (1.0 + std::exp(-x[i]));
}

template <class T>
NRL_VEC_INLINE void forward_lanes(const T* gate, const T* up, T* act) {
  using A = accumulate_t<T>;
  A s[kLanes];
  sigmoids(gate, s);
  for (int k = 0; k < kLanes; ++k) act[k] = static_cast<T>(static_cast<A>(gate[k]) * s[k] * static_cast<A>(up[k]));
}

template <class T>
NRL_VEC_INLINE void backward_lanes(const T* d_act, const T* gate, const T* up, T* d_gate, T* d_up) {
  using A = accumulate_t<T>;
  A s[kLanes];
  sigmoids(gate, s);
  for (int k = 0; k < kLanes; ++k) {
    const A g = static_cast<A>(gate[k]), u = static_cast<A>(up[k]), d = static_cast<A>(d_act[k]);
    d_gate[k] = static_cast<T>(d * u * s[k] * (A(1) + g * (A(1) - s[k])));
    d_up[k] = static_cast<T>(d * g * s[k]);
  }
}

/// The last n < kLanes values, padded with zeros.
template <class T>
struct Padded {
  Padded(const T* x, std::int64_t n) { std::memcpy(v, x, static_cast<std::size_t>(n) * sizeof(T)); }
  T v[kLanes] = {};
};

template <class T>
void forward(const T* gate_up, T* act, std::int64_t I, std::int64_t begin, std::int64_t end) {
  for (std::int64_t t = begin; t < end; ++t) {
    const T *gate = gate_up + t * 2 * I, *up = gate + I;
    T* const out = act + t * I;
    std::int64_t i = 0;
    for (; i + kLanes <= I; i += kLanes) forward_lanes(gate + i, up + i, out + i);
    if (i == I) continue;
    T last[kLanes];
    forward_lanes(Padded<T>(gate + i, I - i).v, Padded<T>(up + i, I - i).v, last);
    std::memcpy(out + i, last, static_cast<std::size_t>(I - i) * sizeof(T));
  }
}

template <class T>
void backward(const T* d_act, const T* gate_up, T* d_gate_up, std::int64_t I, std::int64_t begin, std::int64_t end) {
  for (std::int64_t t = begin; t < end; ++t) {
    const T *d = d_act + t * I, *gate = gate_up + t * 2 * I, *up = gate + I;
    T *const d_gate = d_gate_up + t * 2 * I, *const d_up = d_gate + I;
    std::int64_t i = 0;
    for (; i + kLanes <= I; i += kLanes) backward_lanes(d + i, gate + i, up + i, d_gate + i, d_up + i);
    if (i == I) continue;
    T last_gate[kLanes], last_up[kLanes];
    backward_lanes(Padded<T>(d + i, I - i).v, Padded<T>(gate + i, I - i).v, Padded<T>(up + i, I - i).v, last_gate, last_up);
    std::memcpy(d_gate + i, last_gate, static_cast<std::size_t>(I - i) * sizeof(T));
    std::memcpy(d_up + i, last_up, static_cast<std::size_t>(I - i) * sizeof(T));
  }
}

}  // namespace

void swiglu_forward_f32(const float* g, float* a, std::int64_t I, std::int64_t b, std::int64_t e) { forward(g, a, I, b, e); }
void swiglu_forward_f64(const double* g, double* a, std::int64_t I, std::int64_t b, std::int64_t e) { forward(g, a, I, b, e); }
void swiglu_forward_bf16(const bfloat16* g, bfloat16* a, std::int64_t I, std::int64_t b, std::int64_t e) { forward(g, a, I, b, e); }
void swiglu_backward_f32(const float* d, const float* g, float* o, std::int64_t I, std::int64_t b, std::int64_t e) { backward(d, g, o, I, b, e); }
void swiglu_backward_f64(const double* d, const double* g, double* o, std::int64_t I, std::int64_t b, std::int64_t e) { backward(d, g, o, I, b, e); }
void swiglu_backward_bf16(const bfloat16* d, const bfloat16* g, bfloat16* o, std::int64_t I, std::int64_t b, std::int64_t e) { backward(d, g, o, I, b, e); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
