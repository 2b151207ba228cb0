// The gated delta rule (Yang et al., 2024, "Gated Delta Networks"), token by token. For each value head with the state
// S [dk, dv], float32 (float64 for float64 models):
//   q^ = q / sqrt(sum q^2 + 1e-6) / sqrt(dk),  k^ = k / sqrt(sum k^2 + 1e-6)
//   decay = exp(-exp(A_log) · softplus(a + dt_bias)),  beta = sigmoid(b)
//   m = decay · S^T k^,  delta = beta · (v - m),  S = decay · S + k^ delta^T,  o = S^T q^
//
// Mamba-2 (Dao and Gu, 2024, "Transformers are SSMs") is the same recurrence without the delta term and without the
// norms, with D [U] and limits of the time step (RecurrentShape):
//   step = clamp(softplus(a + dt_bias)),  decay = exp(-exp(A_log) · step)
//   delta = step · v,  S = decay · S + k delta^T,  o = S^T q + D · v
//
// The order of every sum is declared, and prefill, decode, scoring and training share it: a token's state follows from
// the state before it alone, so no chunk, batch or packing can change a bit. S^T k^ of a column is two chains of
// multiply-adds, over the even and over the odd rows of S in ascending order, and their sum; S^T q^ is one chain, to
// which D · v is added last. The sums of squares run over 16 lanes, which are added as a fixed tree.
#pragma once
#include <cmath>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"
#include "common/host_device.h"
#include "kernels/recurrence.h"

namespace nemo_rl::kernels {

inline constexpr double kL2Epsilon = 1e-6;

/// What a token's numbers a and b decide for one head. In Mamba-2 beta is the step.
template <class A>
struct DeltaGates {
  A beta, decay;
  A rate;  ///< exp(A_log)
  A log_decay;
  A slope;  ///< of softplus at a + dt_bias; 0 where the step is clamped
};
template <class A>
NRL_INLINE DeltaGates<A> delta_gates(double a, double b, double A_log, double dt_bias) {
  const double x = a + dt_bias, rate = std::exp(A_log);
  const double softplus = x > 20 ? x : std::log1p(std::exp(x));  // torch's threshold
  return {static_cast<A>(1 / (1 + std::exp(-b))), static_cast<A>(std::exp(-rate * softplus)), static_cast<A>(rate),
          static_cast<A>(-rate * softplus), static_cast<A>(1 / (1 + std::exp(-x)))};
}
template <class A>
NRL_INLINE DeltaGates<A> step_gates(double a, double A_log, double dt_bias, double least, double greatest) {
  const auto free = delta_gates<double>(a, 0, A_log, dt_bias);
  const double softplus = a + dt_bias > 20 ? a + dt_bias : std::log1p(std::exp(a + dt_bias));
  const bool is_clamped = softplus < least || softplus > greatest;
  const double step = softplus < least ? least : softplus > greatest ? greatest : softplus;
  return {static_cast<A>(step), static_cast<A>(std::exp(-free.rate * step)), static_cast<A>(free.rate),
          static_cast<A>(-free.rate * step), static_cast<A>(is_clamped ? 0 : free.slope)};
}

template <class T>
struct RecurrenceArgs {
  const T *q, *k, *v;  ///< [T, P·dk], [T, P·dk] and [T, U·dv] behind the convolution
  std::int64_t stride_qkv;
  const T* b;  ///< [T, U]; nullptr in Mamba-2
  const T* a;  ///< [T, U]
  std::int64_t stride_ab;
  const T* A_log;    ///< [U]
  const T* dt_bias;  ///< [U]
  const T* D;        ///< [U]; nullptr in a gated delta net
  RecurrentShape shape;
};

/// Rows [start, start + length) of value head `head`, in order, from `state`, which becomes that after the last row;
/// out [T, U·dv].
template <class T>
using RecurrenceForward = void(const RecurrenceArgs<T>& p, std::int64_t start, std::int64_t length, std::int64_t head,
                               accumulate_t<T>* state, T* out, std::int64_t stride_out);
NRL_DECLARE_CPU_KERNEL(recurrence_forward_f32, RecurrenceForward<float>);
NRL_DECLARE_CPU_KERNEL(recurrence_forward_f64, RecurrenceForward<double>);
NRL_DECLARE_CPU_KERNEL(recurrence_forward_bf16, RecurrenceForward<bfloat16>);

template <class T>
struct RecurrenceGradients {
  const T* d_out;  ///< [T, U·dv]
  std::int64_t stride_out;
  T *d_q, *d_k, *d_v;  ///< like q, k and v
  std::int64_t stride_qkv;
  T *d_b, *d_a;  ///< like b and a
  std::int64_t stride_ab;
  accumulate_t<T>*d_A_log, *d_dt_bias, *d_D;  ///< [T, U]: each row's share
};

/// Gradients of rows [start, start + length) for the value heads of key head `key_head`, in chunks of kDeltaChunk rows.
/// `state` [group, dk·dv]: before the first row. `d_state`, of the same shape: the gradient of the state after the last
/// row, and then that of `state`. `scratch` has recurrence_scratch(shape, length) elements.
template <class T>
using RecurrenceBackward = void(const RecurrenceArgs<T>& p, const RecurrenceGradients<T>& g, std::int64_t start,
                                std::int64_t length, std::int64_t key_head, const accumulate_t<T>* state,
                                accumulate_t<T>* d_state, accumulate_t<T>* scratch);
NRL_DECLARE_CPU_KERNEL(recurrence_backward_f32, RecurrenceBackward<float>);
NRL_DECLARE_CPU_KERNEL(recurrence_backward_f64, RecurrenceBackward<double>);
NRL_DECLARE_CPU_KERNEL(recurrence_backward_bf16, RecurrenceBackward<bfloat16>);

inline constexpr std::int64_t kDeltaChunk = 32;
inline std::int64_t recurrence_scratch(const RecurrentShape& s, std::int64_t length) {
  const std::int64_t chunks = (length + kDeltaChunk - 1) / kDeltaChunk, dk = s.key_dim, dv = s.value_dim;
  return chunks * s.group() * dv * (dk + kDeltaChunk) + kDeltaChunk * (9 * dk + 8 * dv + 9 * kDeltaChunk);
}

}  // namespace nemo_rl::kernels
