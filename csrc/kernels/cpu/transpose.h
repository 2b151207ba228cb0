// Transposing a square of vectors in registers.
#pragma once
#include <cstddef>
#include <utility>

#include "kernels/cpu/native_vector.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class Vec, class Mask, std::size_t... I>
[[gnu::always_inline]] inline Vec interleave_low(Vec a, Vec b, std::index_sequence<I...>) {
  constexpr auto width = sizeof...(I);
  return shuffled<Mask, static_cast<int>(I % 2 ? width + I / 2 : I / 2)...>(a, b);
}
template <class Vec, class Mask, std::size_t... I>
[[gnu::always_inline]] inline Vec interleave_high(Vec a, Vec b, std::index_sequence<I...>) {
  constexpr auto width = sizeof...(I);
  return shuffled<Mask, static_cast<int>((I % 2 ? width + I / 2 : I / 2) + width / 2)...>(a, b);
}

/// v[i][j] and v[j][i] change places: log2(width) perfect shuffles. Mask: the integer vector of the same lanes.
template <class Mask, class Vec, int width>
[[gnu::always_inline]] inline void transpose_square(Vec (&v)[width]) {
  constexpr auto lanes = std::make_index_sequence<width>{};
#pragma GCC unroll 4
  for (int stage = 1; stage < width; stage *= 2) {
    Vec next[width];
#pragma GCC unroll 8
    for (int i = 0; i < width / 2; ++i) {
      next[2 * i] = interleave_low<Vec, Mask>(v[i], v[i + width / 2], lanes);
      next[2 * i + 1] = interleave_high<Vec, Mask>(v[i], v[i + width / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < width; ++i) v[i] = next[i];
  }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
