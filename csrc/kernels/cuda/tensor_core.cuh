// What a warp asks of the tensor cores, and how operands come to them: products of bfloat16 summed in float32 (PTX
// mma.m16n8k16), 8 x 8 matrices from shared memory (ldmatrix), and copies from global to shared memory that go on
// beside the arithmetic (cp.async). All lanes of a warp call these together, except the copies. The tests' emulation
// has its own file of this name.
//
// Lane 4g + t holds pairs of neighbours in a row, two bfloat16 in a word, the left one in the lower half:
//   a, 16 x 16:   row g, columns 2t and 2t + 1 | row g + 8, the same | row g, columns 2t + 8 and 2t + 9 | row g + 8,
//   the same b, 16 x 8:    column g, rows 2t and 2t + 1 | column g, rows 2t + 8 and 2t + 9 d, 16 x 8:    row g, columns
//   2t and 2t + 1 | row g + 8, the same; one float each
#pragma once
#include <cstdint>

#include "common/bfloat16.h"

namespace nemo_rl::kernels {

/// d += a b. What a row of d becomes does not depend on the other rows of a.
__device__ __forceinline__ void multiply_add(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// Four 8 x 8 matrices in shared memory: lane 8i + r gives row r of matrix i (16-byte aligned). to[i] becomes, of lane
/// 4g + t, matrix i's row g, columns 2t and 2t + 1.
__device__ __forceinline__ void load_matrices(const bfloat16* row, std::uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row)));
}

/// The same of the matrices' transposes: to[i] becomes column g, rows 2t and 2t + 1.
__device__ __forceinline__ void load_matrices_transposed(const bfloat16* row, std::uint32_t (&to)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row)));
}

/// Two values rounded to nearest even.
__device__ __forceinline__ std::uint32_t bfloat16_pair(float left, float right) {
  std::uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(right), "f"(left));
  return pair;
}

/// 2^x; 0 where that is below the least normal number.
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Begins to copy Bytes (4 or 16, as the addresses are aligned) to shared memory; zeros where nothing is `present`.
template <int Bytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, bool present) {
  static_assert(Bytes == 4 || Bytes == 16);
  const int bytes = present ? Bytes : 0;
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)),
                 "l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
  }
}

/// The copies begun since the last call are one group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits for this thread's copies, except those of the last `Newest` groups.
template <int Newest>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Newest) : "memory");
}

}  // namespace nemo_rl::kernels
