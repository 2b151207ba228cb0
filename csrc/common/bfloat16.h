// bfloat16 storage for torch-free kernels: the bits are at::BFloat16's, the arithmetic is float32.
#pragma once
#include <cstdint>

#include "common/host_device.h"

namespace nemo_rl {

struct bfloat16 {
  std::uint16_t bits = 0;

  bfloat16() = default;
  /// Rounds to nearest even; NaN stays NaN.
  NRL_HOST_DEVICE explicit bfloat16(float value) {
    const auto u = __builtin_bit_cast(std::uint32_t, value);
    bits = (u & 0x7fffffffu) > 0x7f800000u ? static_cast<std::uint16_t>((u >> 16) | 0x40u)
                                           : static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  NRL_HOST_DEVICE explicit operator float() const {
    return __builtin_bit_cast(float, static_cast<std::uint32_t>(bits) << 16);
  }
};

/// The type in which sums over values of type T are kept.
template <class T>
struct accumulate_type {
  using type = T;
};
template <>
struct accumulate_type<bfloat16> {
  using type = float;
};
template <class T>
using accumulate_t = typename accumulate_type<T>::type;

}  // namespace nemo_rl
