// Tensors compared by their largest difference, and random ones from a seed.
#pragma once
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "runtime/tensor.h"

namespace nemo_rl::ops {

/// Normal numbers, the same for a seed.
inline at::Tensor randn(at::IntArrayRef shape, std::uint64_t seed, at::ScalarType type = at::kDouble) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator, at::kDouble).to(type);
}

inline void expect_close(const at::Tensor& got, const at::Tensor& expected, double bound, const char* what = "") {
  ASSERT_EQ(got.sizes(), expected.sizes()) << what;
  const double scale = expected.abs().max().to(at::kDouble).item<double>() + 1e-30;
  EXPECT_LE((got.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>(), bound * scale)
      << what << " in " << c10::toString(got.scalar_type());
}

/// Relative to the largest value: the rounding of results; sums are formed in a type at least as wide as float32.
inline double bound_of(at::ScalarType type) { return type == at::kDouble ? 1e-13 : type == at::kFloat ? 2e-6 : 8e-3; }

inline constexpr at::ScalarType kTypes[] = {at::kDouble, at::kFloat, at::kBFloat16};
/// The type of sums of `type`.
inline at::ScalarType sums_of(at::ScalarType type) { return type == at::kDouble ? at::kDouble : at::kFloat; }

}  // namespace nemo_rl::ops
