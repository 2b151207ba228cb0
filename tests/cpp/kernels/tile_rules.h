// The rules of the tile instruction (TDPBF16PS) once more, as plain loops over one output, and which kernels this
// machine can try: those of the tile in software, and AMX's where it can be had.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"

namespace nemo_rl::kernels {

inline float without_denormals(float v) { return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.0f, v) : v; }

/// sum + one step of terms a(k) * b(k), k = 0..31: a chain of the even and one of the odd terms.
template <class A, class B>
float tile_step(float sum, const A& a, const B& b) {
  float chains[2] = {0, 0};
  for (int k = 0; k < 32; ++k)
    chains[k % 2] = without_denormals(std::fma(without_denormals(a(k)), without_denormals(b(k)), chains[k % 2]));
  return without_denormals(without_denormals(sum) + without_denormals(chains[0] + chains[1]));
}

/// Steps over `terms` terms from `sum` on; terms beyond are zero.
template <class A, class B>
float tile_sum(std::int64_t terms, const A& a, const B& b, float sum = 0) {
  for (std::int64_t k0 = 0; k0 < terms; k0 += 32)
    sum = tile_step(
        sum, [&](int k) { return k0 + k < terms ? a(k0 + k) : 0.0f; },
        [&](int k) { return k0 + k < terms ? b(k0 + k) : 0.0f; });
  return sum;
}

inline bool has_software_tiles() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}
/// The same with the vectors of AMX's kernels.
inline bool has_software_tiles_avx512() {
#if defined(__x86_64__)
  return has_software_tiles() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}
inline bool has_amx_tiles() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && amx_is_granted();
#else
  return false;
#endif
}

enum class Values { normal, spread, any_bits };

inline std::vector<bfloat16> drawn(std::int64_t count, Values values, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-30, 30);
  std::vector<bfloat16> out(static_cast<std::size_t>(count));
  for (auto& v : out) {
    if (values == Values::any_bits) {
      v.bits = static_cast<std::uint16_t>(random());
    } else {
      v = bfloat16(std::ldexp(normal(random), values == Values::spread ? exponent(random) : 0));
    }
  }
  return out;
}

inline void expect_bits(float got, float expected, const char* kernels, std::int64_t at) {
  if (std::isnan(expected)) {
    EXPECT_TRUE(std::isnan(got)) << kernels << " at " << at;
  } else {
    EXPECT_EQ(std::memcmp(&got, &expected, sizeof(got)), 0)
        << kernels << " at " << at << ": " << got << ", not " << expected;
  }
}

}  // namespace nemo_rl::kernels
