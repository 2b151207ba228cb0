// silu(gate) · up for kLanes values, as every path computes it.
#pragma once
#include <cmath>

#include "kernels/cpu/vec_math.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

/// sigmoid of kLanes values into out.
NRL_VEC_INLINE void sigmoids(const double* x, double* out) {
  for (int i = 0; i < kLanes; ++i) out[i] = 1.0 / (1.0 + std::exp(-x[i]));
}

template <class T>
NRL_VEC_INLINE void forward_lanes(const T* gate, const T* up, T* act) {
  const f32x16 g = load16(gate);
  store16(act, g * sigmoid16(g) * load16(up));
}
NRL_VEC_INLINE void forward_lanes(const double* gate, const double* up, double* act) {
  double s[kLanes];
  sigmoids(gate, s);
  for (int k = 0; k < kLanes; ++k) act[k] = gate[k] * s[k] * up[k];
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
