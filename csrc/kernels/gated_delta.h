// The gated delta rule (Yang et al., 2024, "Gated Delta Networks"), token by token. For each value head with the state
// S [dk, dv], float32 (float64 for float64 models):
//   q^ = q / sqrt(sum q^2 + 1e-6) / sqrt(dk),  k^ = k / sqrt(sum k^2 + 1e-6)
//   decay = exp(-exp(A_log) · softplus(a + dt_bias)),  beta = sigmoid(b)
//   m = decay · S^T k^,  delta = beta · (v - m),  S = decay · S + k^ delta^T,  o = S^T q^
//
// The order of every sum is declared, and prefill, decode, scoring and training share it: a token's state follows from
// the state before it alone, so no chunk, batch or packing can change a bit. S^T k^ of a column is two chains of
// multiply-adds, over the even and over the odd rows of S in ascending order, and their sum; S^T q^ is one chain. The
// sums of squares run over 16 lanes, which are added as a fixed tree.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"
#include "common/host_device.h"
#include "kernels/recurrence.h"

namespace nemo_rl::kernels {

inline constexpr double kL2Epsilon = 1e-6;

/// What a token's numbers a and b decide for one head.
template <class A>
struct DeltaGates {
  A beta, decay;
  A rate;  ///< exp(A_log)
  A log_decay;
  A slope;  ///< of softplus at a + dt_bias
};
template <class A>
NRL_INLINE DeltaGates<A> delta_gates(double a, double b, double A_log, double dt_bias) {
  const double x = a + dt_bias, rate = std::exp(A_log);
  const double softplus = x > 20 ? x : std::log1p(std::exp(x));  // torch's threshold
  return {static_cast<A>(1 / (1 + std::exp(-b))), static_cast<A>(std::exp(-rate * softplus)), static_cast<A>(rate),
          static_cast<A>(-rate * softplus), static_cast<A>(1 / (1 + std::exp(-x)))};
}

template <class T>
struct GatedDeltaArgs {
  const T* qkv;  ///< [T, conv_size] behind the convolution
  std::int64_t stride_qkv;
  const T* b;  ///< [T, U]
  const T* a;  ///< [T, U]
  std::int64_t stride_ab;
  const T* A_log;    ///< [U]
  const T* dt_bias;  ///< [U]
  GatedDeltaShape shape;
};

/// Rows [start, start + length) of value head `head`, in order, from `state`, which becomes that after the last row;
/// out [T, U·dv].
template <class T>
using GatedDeltaForward = void(const GatedDeltaArgs<T>& p, std::int64_t start, std::int64_t length, std::int64_t head,
                               accumulate_t<T>* state, T* out, std::int64_t stride_out);
NRL_DECLARE_CPU_KERNEL(gated_delta_forward_f32, GatedDeltaForward<float>);
NRL_DECLARE_CPU_KERNEL(gated_delta_forward_f64, GatedDeltaForward<double>);
NRL_DECLARE_CPU_KERNEL(gated_delta_forward_bf16, GatedDeltaForward<bfloat16>);

template <class T>
struct GatedDeltaGradients {
  const T* d_out;  ///< [T, U·dv]
  std::int64_t stride_out;
  T* d_qkv;  ///< like qkv
  std::int64_t stride_qkv;
  T *d_b, *d_a;  ///< like b and a
  std::int64_t stride_ab;
  accumulate_t<T>*d_A_log, *d_dt_bias;  ///< [T, U]: each row's share
};

/// Gradients of rows [start, start + length) for the value heads of key head `key_head`, in chunks of kDeltaChunk rows.
/// `state` [group, dk·dv]: before the first row. `d_state`, of the same shape: the gradient of the state after the last
/// row, and then that of `state`. `scratch` has gated_delta_scratch(shape, length) elements.
template <class T>
using GatedDeltaBackward = void(const GatedDeltaArgs<T>& p, const GatedDeltaGradients<T>& g, std::int64_t start,
                                std::int64_t length, std::int64_t key_head, const accumulate_t<T>* state,
                                accumulate_t<T>* d_state, accumulate_t<T>* scratch);
NRL_DECLARE_CPU_KERNEL(gated_delta_backward_f32, GatedDeltaBackward<float>);
NRL_DECLARE_CPU_KERNEL(gated_delta_backward_f64, GatedDeltaBackward<double>);
NRL_DECLARE_CPU_KERNEL(gated_delta_backward_bf16, GatedDeltaBackward<bfloat16>);

inline constexpr std::int64_t kDeltaChunk = 32;
inline std::int64_t gated_delta_scratch(const GatedDeltaShape& s, std::int64_t length) {
  const std::int64_t chunks = (length + kDeltaChunk - 1) / kDeltaChunk, dk = s.key_dim, dv = s.value_dim;
  return chunks * s.group() * dv * (dk + kDeltaChunk) + kDeltaChunk * (9 * dk + 8 * dv + 9 * kDeltaChunk);
}

}  // namespace nemo_rl::kernels
