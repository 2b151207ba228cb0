// The normalised queries and keys of a gated delta net, for its forward and its backward.
#pragma once
#include "kernels/cpu/wide_lanes.h"
#include "kernels/gated_delta.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// y = x · scale / sqrt(sum x^2 + kL2Epsilon); returns the factor before `scale`.
template <class T>
NRL_VEC accumulate_t<T> l2_normalised(const T* x, std::int64_t n, accumulate_t<T> scale, accumulate_t<T>* y) {
  using A = accumulate_t<T>;
  const A inverse = A(1) / std::sqrt(sum_of_squares(x, n) + static_cast<A>(kL2Epsilon));
  for (std::int64_t i = 0; i < n; i += 16) store(y + i, load<Wide<T>>(x + i) * inverse * scale);
  return inverse;
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

/// One token for W strips of a state: m and delta of each strip, and the strips after it in `after` (which may be
/// `before`). Strips lie `strip` elements apart. With a query, `out` is what it reads of the new state.
template <int W, bool with_query, class A>
NRL_VEC void update_state(const A* before, A* after, std::int64_t strip, std::int64_t dk, const A* key,
                          Vec<A, 16> (&value)[W], A decay, A beta, Vec<A, 16> (&m)[W], Vec<A, 16> (&delta)[W],
                          const A* query, Vec<A, 16> (&out)[W]) {
  using V = Vec<A, 16>;
  V odd[W];
  for (int w = 0; w < W; ++w) m[w] = V{}, odd[w] = V{};
  for (std::int64_t k = 0; k < dk; k += 2) {
    V even_key(key[k]), odd_key(key[k + 1]);
    for (int w = 0; w < W; ++w) {
      m[w] = mul_add(load<V>(before + w * strip + k * kStrip), even_key, m[w]);
      odd[w] = mul_add(load<V>(before + w * strip + (k + 1) * kStrip), odd_key, odd[w]);
    }
  }
  for (int w = 0; w < W; ++w) {
    m[w] = (m[w] + odd[w]) * decay;
    delta[w] = (value[w] - m[w]) * beta;
  }
  V all_decay(decay);
  if constexpr (with_query)
    for (int w = 0; w < W; ++w) out[w] = V{};
  for (std::int64_t k = 0; k < dk; ++k) {
    V own_key(key[k]);
    for (int w = 0; w < W; ++w) {
      V s = mul_add(own_key, delta[w], load<V>(before + w * strip + k * kStrip) * all_decay);
      store(after + w * strip + k * kStrip, s);
      if constexpr (with_query) out[w] = mul_add(s, V(query[k]), out[w]);
    }
  }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
