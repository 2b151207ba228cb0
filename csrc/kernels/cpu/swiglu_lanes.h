// silu(gate) · up for kLanes values, as every path computes it.
#pragma once
#include <cmath>

#include "common/bfloat16.h"
#include "kernels/cpu/vec_math.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

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

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
