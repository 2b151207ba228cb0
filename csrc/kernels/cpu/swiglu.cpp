#include "kernels/swiglu.h"

#include <cmath>

#include "kernels/cpu/vec_math.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// sigmoid of n <= 16 values into out.
template <class T>
void sigmoids(const T* x, int n, float* out) {
  float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = static_cast<float>(x[i]);
  store16(out, sigmoid16(load16(lanes)));
}
void sigmoids(const double* x, int n, double* out) {
  for (int i = 0; i < n; ++i) out[i] = 1.0 / (1.0 + std::exp(-x[i]));
}

template <class T>
void forward(const T* gate_up, T* act, std::int64_t I, std::int64_t begin, std::int64_t end) {
  using A = accumulate_t<T>;
  for (std::int64_t t = begin; t < end; ++t) {
    const T* gate = gate_up + t * 2 * I;
    for (std::int64_t i = 0; i < I; i += kLanes) {
      const int n = static_cast<int>(I - i < kLanes ? I - i : kLanes);
      A s[kLanes];
      sigmoids(gate + i, n, s);
      if (n == kLanes) {  // a full vector: fixed trip count
        for (int k = 0; k < kLanes; ++k)
          act[t * I + i + k] = static_cast<T>(static_cast<A>(gate[i + k]) * s[k] * static_cast<A>(gate[I + i + k]));
      } else {
        for (int k = 0; k < n; ++k)
          act[t * I + i + k] = static_cast<T>(static_cast<A>(gate[i + k]) * s[k] * static_cast<A>(gate[I + i + k]));
      }
    }
  }
}

template <class T>
void backward(const T* d_act, const T* gate_up, T* d_gate_up, std::int64_t I, std::int64_t begin, std::int64_t end) {
  using A = accumulate_t<T>;
  for (std::int64_t t = begin; t < end; ++t) {
    const T* gate = gate_up + t * 2 * I;
    T* d_gate = d_gate_up + t * 2 * I;
    for (std::int64_t i = 0; i < I; i += kLanes) {
      const int n = static_cast<int>(I - i < kLanes ? I - i : kLanes);
      A s[kLanes];
      sigmoids(gate + i, n, s);
      for (int k = 0; k < n; ++k) {
        const A g = static_cast<A>(gate[i + k]), u = static_cast<A>(gate[I + i + k]), d = static_cast<A>(d_act[t * I + i + k]);
        d_gate[i + k] = static_cast<T>(d * u * s[k] * (A(1) + g * (A(1) - s[k])));
        d_gate[I + i + k] = static_cast<T>(d * g * s[k]);
      }
    }
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
