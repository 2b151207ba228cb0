// f(gate) · up for kLanes values, as every path computes it.
#pragma once
#include <cmath>

#include "kernels/cpu/vec.h"
#include "kernels/swiglu.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

/// The sigmoid register by register, with the same bits: behind a product the exponentials of two registers at once
/// would not fit beside the other operands (AVX2, bfloat16: the gated product took 1.05 times as long).
NRL_VEC Floats sigmoid_by_registers(Floats x) {
  for (auto& part : x.part) {
    Vec<float, kRegisterLanes<float>> one;
    one.part[0] = part;
    part = sigmoid(one).part[0];
  }
  return x;
}
/// sigmoid of kLanes values into out.
NRL_VEC void sigmoids(const double* x, double* out) {
  for (int i = 0; i < kLanes; ++i) out[i] = 1.0 / (1.0 + std::exp(-x[i]));
}

/// z of kernels/swiglu.h. V: double or Floats; Real: its numbers.
template <Gate G, class Real, class V>
NRL_VEC V gate_argument(V x) {
  if constexpr (G == Gate::silu) return x;
  return x * static_cast<Real>(kGeluScale) * (x * x * static_cast<Real>(kGeluCubic) + static_cast<Real>(1));
}

template <Gate G, bool kByRegisters = false, class T>
NRL_VEC void forward_lanes(const T* gate, const T* up, T* act) {
  Floats g = load<Floats>(gate), z = gate_argument<G, float>(g);
  store(act, g * (kByRegisters ? sigmoid_by_registers(z) : sigmoid(z)) * load<Floats>(up));
}
template <Gate G, bool = false>
NRL_VEC void forward_lanes(const double* gate, const double* up, double* act) {
  double s[kLanes];
  for (int k = 0; k < kLanes; ++k) s[k] = gate_argument<G, double>(gate[k]);
  sigmoids(s, s);
  for (int k = 0; k < kLanes; ++k) act[k] = gate[k] * s[k] * up[k];
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
