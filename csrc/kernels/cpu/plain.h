// What kernels need of <algorithm>, always inlined. A standard template would leave a symbol that every file of the
// library shares: the linker could keep the copy compiled for AVX-512, and run it on a machine that has none.
#pragma once
#include <cstdint>
#include <type_traits>

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T>
[[gnu::always_inline]] inline constexpr T smaller(T a, T b) {
  return b < a ? b : a;
}

template <class T>
[[gnu::always_inline]] inline constexpr T larger(T a, T b) {
  return a < b ? b : a;
}

[[gnu::always_inline]] inline constexpr std::int64_t clamped(std::int64_t x, std::int64_t low, std::int64_t high) {
  return smaller(larger(x, low), high);
}

/// Calls f(integral_constant<int, n>) for 1 <= n <= Max.
template <int Max, class F>
[[gnu::always_inline]] inline void with_constant(int n, const F& f) {
  if constexpr (Max == 1) {
    f(std::integral_constant<int, 1>{});
  } else {
    if (n == Max) return f(std::integral_constant<int, Max>{});
    with_constant<Max - 1>(n, f);
  }
}

template <class T>
[[gnu::always_inline]] inline void fill(T* to, std::int64_t n, T value) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = value;
}

template <class T>
[[gnu::always_inline]] inline void copy(const T* from, std::int64_t n, T* to) {
  for (std::int64_t i = 0; i < n; ++i) to[i] = from[i];
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
