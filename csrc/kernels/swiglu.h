// Gated activation (Shazeer, 2020): act = f(gate) · up, f(x) = x · sigmoid(z(x)).
// The clamped one is gpt-oss's: act = f(min(gate, 7)) · (1 + min(max(up, -7), 7)), z(x) = 1.702·x.
// The squared ReLU (So et al., 2021) has no gate: act = max(up, 0)^2 (ops/swiglu.cpp).
#pragma once
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"

namespace nemo_rl::kernels {

enum class Gate {
  silu,       ///< z(x) = x
  gelu_tanh,  ///< z(x) = 2·sqrt(2/pi)·(x + 0.044715·x^3): gelu by tanh (Hendrycks and Gimpel, 2016), since 1 +
              ///< tanh(z/2) = 2·sigmoid(z)
  clamped,
  relu_squared,
};
inline constexpr bool has_gate(Gate gate) { return gate != Gate::relu_squared; }
inline constexpr double kClampedLimit = 7.0, kClampedSlope = 1.702;
inline constexpr double kGeluScale = 1.5957691216057308, kGeluCubic = 0.044715;

/// gate_up [T, 2I] (gate first) -> act [T, I], both contiguous.
template <class T>
using SwigluForward = void(const T* gate_up, T* act, std::int64_t I, Gate gate, std::int64_t begin, std::int64_t end);
NRL_DECLARE_CPU_KERNEL(swiglu_forward_f32, SwigluForward<float>);
NRL_DECLARE_CPU_KERNEL(swiglu_forward_f64, SwigluForward<double>);
NRL_DECLARE_CPU_KERNEL(swiglu_forward_bf16, SwigluForward<bfloat16>);

/// d_act [T, I], gate_up -> d_gate_up [T, 2I] (may be gate_up itself).
template <class T>
using SwigluBackward = void(const T* d_act, const T* gate_up, T* d_gate_up, std::int64_t I, Gate gate,
                            std::int64_t begin, std::int64_t end);
NRL_DECLARE_CPU_KERNEL(swiglu_backward_f32, SwigluBackward<float>);
NRL_DECLARE_CPU_KERNEL(swiglu_backward_f64, SwigluBackward<double>);
NRL_DECLARE_CPU_KERNEL(swiglu_backward_bf16, SwigluBackward<bfloat16>);

}  // namespace nemo_rl::kernels
