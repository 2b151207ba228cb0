// The queries, keys and gates of a recurrent layer, for its forward and its backward.
#pragma once
#include "kernels/cpu/wide_lanes.h"
#include "kernels/gated_delta.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// y = x · scale / sqrt(sum x^2 + kL2Epsilon). Each 16 numbers of y are at `stride` from those before them.
template <class T>
NRL_VEC void l2_normalised(const T* x, std::int64_t n, accumulate_t<T> scale, accumulate_t<T>* y,
                           std::int64_t stride = 16) {
  using A = accumulate_t<T>;
  const A inverse = A(1) / std::sqrt(sum_of_squares(x, n) + static_cast<A>(kL2Epsilon));
  for (std::int64_t i = 0; i < n; i += 16) store(y + i / 16 * stride, load<Wide<T>>(x + i) * inverse * scale);
}

/// A query or key as the recurrence reads it: normalised, or unchanged in Mamba-2. Arguments as of l2_normalised.
template <Recurrence kRule, class T>
NRL_VEC void read_key(const T* x, std::int64_t n, accumulate_t<T> scale, accumulate_t<T>* y, std::int64_t stride = 16) {
  if constexpr (kRule == Recurrence::gated_delta) return l2_normalised(x, n, scale, y, stride);
  for (std::int64_t i = 0; i < n; i += 16) store(y + i / 16 * stride, load<Wide<T>>(x + i));
}

template <class A>
A query_scale(const RecurrentShape& s) {
  return static_cast<A>(1 / std::sqrt(static_cast<double>(s.key_dim)));
}

template <Recurrence kRule, class T>
DeltaGates<accumulate_t<T>> gates_at(const RecurrenceArgs<T>& p, std::int64_t row, std::int64_t head) {
  using A = accumulate_t<T>;
  const auto number = [](T x) { return static_cast<double>(static_cast<A>(x)); };
  const double a = number(p.a[row * p.stride_ab + head]), A_log = number(p.A_log[head]),
               dt_bias = number(p.dt_bias[head]);
  if constexpr (kRule == Recurrence::mamba2)
    return step_gates<A>(a, A_log, dt_bias, p.shape.least_step, p.shape.greatest_step);
  else return delta_gates<A>(a, number(p.b[row * p.stride_ab + head]), A_log, dt_bias);
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
