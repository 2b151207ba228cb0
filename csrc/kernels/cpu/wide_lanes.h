// Sixteen lanes of a kernel's accumulation type, and what the recurrent kernels do with them.
#pragma once
#include "common/bfloat16.h"
#include "kernels/cpu/vec.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T>
using Wide = Vec<accumulate_t<T>, 16>;

NRL_VEC Vec<double, 16> sigmoid_of(Vec<double, 16> x) { return 1.0 / (1.0 + exp_of(0.0 - x)); }
NRL_VEC Vec<float, 16> sigmoid_of(Vec<float, 16> x) { return sigmoid(x); }

/// The sum of squares of `n` numbers, n a multiple of 16: lane by lane in ascending order, then over the lanes.
template <class T>
NRL_VEC accumulate_t<T> sum_of_squares(const T* x, std::int64_t n) {
  Wide<T> sum{};
  for (std::int64_t i = 0; i < n; i += 16) {
    Wide<T> v = load<Wide<T>>(x + i);
    sum = mul_add(v, v, sum);
  }
  return sum_of(sum);
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
