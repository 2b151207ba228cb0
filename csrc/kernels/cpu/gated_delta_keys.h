// The normalised queries and keys of a gated delta net, for its forward and its backward.
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

template <class A>
A query_scale(const GatedDeltaShape& s) {
  return static_cast<A>(1 / std::sqrt(static_cast<double>(s.key_dim)));
}

template <class T>
DeltaGates<accumulate_t<T>> gates_at(const GatedDeltaArgs<T>& p, std::int64_t row, std::int64_t head) {
  return delta_gates<accumulate_t<T>>(static_cast<double>(static_cast<accumulate_t<T>>(p.a[row * p.stride_ab + head])),
                                      static_cast<double>(static_cast<accumulate_t<T>>(p.b[row * p.stride_ab + head])),
                                      static_cast<double>(static_cast<accumulate_t<T>>(p.A_log[head])),
                                      static_cast<double>(static_cast<accumulate_t<T>>(p.dt_bias[head])));
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
