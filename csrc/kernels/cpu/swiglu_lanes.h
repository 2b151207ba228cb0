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
  if constexpr (G == Gate::clamped) return x * static_cast<Real>(kClampedSlope);
  return x * static_cast<Real>(kGeluScale) * (x * x * static_cast<Real>(kGeluCubic) + static_cast<Real>(1));
}

NRL_VEC double at_most(double x, double limit) { return x > limit ? limit : x; }
NRL_VEC Floats at_most(Floats x, float limit) { return select(Floats(limit) < x, Floats(limit), x); }
/// What f reads of a gate, and what multiplies f; a NaN stays one.
template <Gate G, class Real, class V>
NRL_VEC V gate_value(V gate) {
  if constexpr (G == Gate::clamped) return at_most(gate, static_cast<Real>(kClampedLimit));
  return gate;
}
template <Gate G, class Real, class V>
NRL_VEC V up_factor(V up) {
  constexpr Real kLimit = static_cast<Real>(kClampedLimit);
  if constexpr (G == Gate::clamped)
    return static_cast<Real>(1) - at_most(static_cast<Real>(0) - at_most(up, kLimit), kLimit);
  return up;
}

template <Gate G, bool kByRegisters = false, class T>
NRL_VEC void forward_lanes(const T* gate, const T* up, T* act) {
  Floats g = gate_value<G, float>(load<Floats>(gate)), z = gate_argument<G, float>(g);
  store(act, g * (kByRegisters ? sigmoid_by_registers(z) : sigmoid(z)) * up_factor<G, float>(load<Floats>(up)));
}
template <Gate G, bool = false>
NRL_VEC void forward_lanes(const double* gate, const double* up, double* act) {
  double s[kLanes];
  for (int k = 0; k < kLanes; ++k) s[k] = gate_argument<G, double>(gate_value<G, double>(gate[k]));
  sigmoids(s, s);
  for (int k = 0; k < kLanes; ++k) act[k] = gate_value<G, double>(gate[k]) * s[k] * up_factor<G, double>(up[k]);
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
