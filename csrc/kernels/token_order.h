// What choosing a token from a row of logits counts with, on every device: an order of the logits as integers, and
// probability masses as integers, whose sums do not depend on the order of summation.
#pragma once
#include <cstdint>

#include "common/host_device.h"

namespace nemo_rl::kernels {

/// Unsigned integers in the order of the floats; -0 equals +0.
NRL_INLINE std::uint32_t order_of(float z) {
  const auto bits = __builtin_bit_cast(std::uint32_t, z + 0.0f);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

/// exp(z - max) in units of 2^-42: a sum over kMaxVocab = 2^21 of them fits 64 bits.
NRL_INLINE std::uint64_t mass_of(float exponential) {
  return static_cast<std::uint64_t>(static_cast<double>(exponential) * 4398046511104.0);
}

/// The mass that the tokens up to the drawn one exceed, for u in [0, 1) and total > 0: in [0, total).
NRL_INLINE std::uint64_t drawn_mass(double u, std::uint64_t total) {
  const auto target = static_cast<std::uint64_t>(u * static_cast<double>(total));
  return target < total ? target : total - 1;
}

/// What top-p keeps at least, of a total > 0: in [1, total].
NRL_INLINE std::uint64_t needed_mass(float top_p, std::uint64_t total) {
  const double exact = static_cast<double>(top_p) * static_cast<double>(total);
  auto need = static_cast<std::uint64_t>(exact);
  if (static_cast<double>(need) < exact) ++need;
  return need < 1 ? 1 : (need > total ? total : need);
}

}  // namespace nemo_rl::kernels
