// Rotary position embedding (Su et al., 2021) of the first R dimensions of a head. Hugging Face pairs dimension i with
// i + R/2; DeepSeek pairs 2i with 2i + 1 (interleaved).
#pragma once
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"
#include "common/host_device.h"

namespace nemo_rl::kernels {

/// Rotates `heads` heads of size H at the start of each row of x by the angle of the row's position, in place:
/// (a, b) -> (a·cos - b·sin, b·cos + a·sin); `inverse` rotates back (the backward pass).
template <class T>
struct RopeArgs {
  T* x;
  std::int64_t stride_x;
  const std::int64_t* positions;  ///< [T]
  const float* cos;               ///< [positions, R/2]
  const float* sin;
  std::int64_t heads, H;
  std::int64_t rotary;  ///< R, the dimensions of a head that are rotated
  bool inverse;
  bool interleaved = false;
};
/// The pair (a, b) turned by the angle with this cosine and sine.
template <class A>
NRL_INLINE void rope_rotate(A a, A b, A cos, A sin, A& first, A& second) {
  first = a * cos - b * sin;
  second = b * cos + a * sin;
}

template <class T>
using Rope = void(const RopeArgs<T>&, std::int64_t begin, std::int64_t end);
NRL_DECLARE_CPU_KERNEL(rope_f32, Rope<float>);
NRL_DECLARE_CPU_KERNEL(rope_f64, Rope<double>);
NRL_DECLARE_CPU_KERNEL(rope_bf16, Rope<bfloat16>);

}  // namespace nemo_rl::kernels
