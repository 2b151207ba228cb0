// The innermost loop of large products on AVX-512: 8 rows by 48 columns of sums in registers. It is written in
// assembler because all 32 registers are in use. From the same loop in C++, a compiler makes code that keeps some of
// the sums in memory. A step multiplies 32-bit words: one float32 of each operand, or a pair of bfloat16 where the
// processor does.
//
// If two threads share a core, each gets about half of the instructions that the core can issue. These instructions
// limit the speed, not the multiply-adds. So a step has few instructions beside its 24 multiply-adds: three loads of
// columns and five loads of elements of a. The other three elements are read by the multiply-adds that use them. This
// costs no instruction, only three loads each; more of them would keep the load ports busy. Columns are loaded one step
// ahead, elements of a one row ahead.
#pragma once
#include <cstdint>

#include "kernels/cpu/terms.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kRegisterRows = 8, kRegisterColumns = 48;

#if defined(__AVX512F__)
constexpr bool kHasRegisterTile = true;

/// A vector of rows that are packed together. Its halves belong to the same step of two panels of a.
[[gnu::always_inline]] inline void store_rows(__m512 rows, float* first, float* second) {
  _mm256_storeu_ps(first, _mm512_castps512_ps256(rows));
  _mm256_storeu_ps(second, _mm512_extractf32x8_ps(rows, 1));
}

// clang-format off: the layout shows which registers are read
#define NRL_MULTIPLY(op, a, x, sum) op " " a ", %%" x ", %%" sum "\n\t"
/// One row of sums. Register w holds its element of a. Then the element at `next` is loaded into register v.
#define NRL_ROW(op, w, v, next, x0, x1, x2, s0, s1, s2) \
  "vbroadcastss " next "(%[a]), %%" v "\n\t" NRL_MULTIPLY(op, "%%" w, x0, s0) NRL_MULTIPLY(op, "%%" w, x1, s1) NRL_MULTIPLY(op, "%%" w, x2, s2)
#define NRL_ROW_FROM_MEMORY(op, at, x0, x1, x2, s0, s1, s2) \
  NRL_MULTIPLY(op, at "(%[a])%{1to16%}", x0, s0) NRL_MULTIPLY(op, at "(%[a])%{1to16%}", x1, s1) NRL_MULTIPLY(op, at "(%[a])%{1to16%}", x2, s2)
#define NRL_COLUMNS(step, j, x) "vmovups 192*" step "+64*" j "(%[b]), %%" x "\n\t"
/// Step s of four, columns x0 to x2; those of the following step go to y0 to y2. Register w holds the element of row 0, and v does after it.
#define NRL_STEP(op, s, after, w, v, x0, x1, x2, y0, y1, y2)                                               \
  NRL_ROW(op, w, v, "32*" s "+8", x0, x1, x2, "zmm8", "zmm9", "zmm10") NRL_COLUMNS(after, "0", y0)         \
  NRL_ROW_FROM_MEMORY(op, "32*" s "+4", x0, x1, x2, "zmm11", "zmm12", "zmm13") NRL_COLUMNS(after, "1", y1) \
  NRL_ROW(op, v, w, "32*" s "+12", x0, x1, x2, "zmm14", "zmm15", "zmm16") NRL_COLUMNS(after, "2", y2)      \
  NRL_ROW(op, w, v, "32*" s "+20", x0, x1, x2, "zmm17", "zmm18", "zmm19")                                  \
  NRL_ROW_FROM_MEMORY(op, "32*" s "+16", x0, x1, x2, "zmm20", "zmm21", "zmm22")                            \
  NRL_ROW(op, v, w, "32*" s "+28", x0, x1, x2, "zmm23", "zmm24", "zmm25")                                  \
  NRL_ROW_FROM_MEMORY(op, "32*" s "+24", x0, x1, x2, "zmm26", "zmm27", "zmm28")                            \
  NRL_ROW(op, w, v, "32*" after, x0, x1, x2, "zmm29", "zmm30", "zmm31")
#define NRL_EACH_SUM(f)                                                                                                       \
  f("0", "0", "zmm8") f("0", "1", "zmm9") f("0", "2", "zmm10") f("1", "0", "zmm11") f("1", "1", "zmm12") f("1", "2", "zmm13") \
  f("2", "0", "zmm14") f("2", "1", "zmm15") f("2", "2", "zmm16") f("3", "0", "zmm17") f("3", "1", "zmm18") f("3", "2", "zmm19") \
  f("4", "0", "zmm20") f("4", "1", "zmm21") f("4", "2", "zmm22") f("5", "0", "zmm23") f("5", "1", "zmm24") f("5", "2", "zmm25") \
  f("6", "0", "zmm26") f("6", "1", "zmm27") f("6", "2", "zmm28") f("7", "0", "zmm29") f("7", "1", "zmm30") f("7", "2", "zmm31")
#define NRL_ZERO(i, j, s) "vpxord %%" s ", %%" s ", %%" s "\n\t"
#define NRL_LOAD(i, j, s) "vmovups %c[row]*" i "+64*" j "(%[sums]), %%" s "\n\t"
#define NRL_STORE(i, j, s) "vmovups %%" s ", %c[row]*" i "+64*" j "(%[sums])\n\t"

/// The code of register_tile, for one instruction that multiplies and adds.
#define NRL_TILE(op)                                                                                               \
  asm volatile(                                                                                                    \
      "test %k[goes_on], %k[goes_on]\n\t"                                                                          \
      "jnz 3f\n\t"                                                                                                 \
      NRL_EACH_SUM(NRL_ZERO)                                                                                       \
      "jmp 4f\n"                                                                                                   \
      "3:\n\t"                                                                                                     \
      NRL_EACH_SUM(NRL_LOAD)                                                                                       \
      "4:\n\t"                                                                                                     \
      "test %[fours], %[fours]\n\t"                                                                                \
      "jz 2f\n\t"                                                                                                  \
      NRL_COLUMNS("0", "0", "zmm0") NRL_COLUMNS("0", "1", "zmm1") NRL_COLUMNS("0", "2", "zmm2")                    \
      "vbroadcastss (%[a]), %%zmm6\n\t"                                                                            \
      ".p2align 4\n"                                                                                               \
      "1:\n\t"                                                                                                     \
      "prefetcht0 512(%[a])\n\t"                                                                                   \
      "prefetcht1 (%[ahead])\n\t"                                                                                  \
      NRL_STEP(op, "0", "1", "zmm6", "zmm7", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5")                       \
      NRL_STEP(op, "1", "2", "zmm7", "zmm6", "zmm3", "zmm4", "zmm5", "zmm0", "zmm1", "zmm2")                       \
      "prefetcht0 576(%[a])\n\t"                                                                                   \
      "add $64, %[ahead]\n\t"                                                                                      \
      NRL_STEP(op, "2", "3", "zmm6", "zmm7", "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5")                       \
      NRL_STEP(op, "3", "4", "zmm7", "zmm6", "zmm3", "zmm4", "zmm5", "zmm0", "zmm1", "zmm2")                       \
      "add $128, %[a]\n\t"                                                                                         \
      "add $768, %[b]\n\t"                                                                                         \
      "dec %[fours]\n\t"                                                                                           \
      "jnz 1b\n"                                                                                                   \
      "2:\n\t"                                                                                                     \
      NRL_EACH_SUM(NRL_STORE)                                                                                      \
      : [a] "+r"(a), [b] "+r"(b), [fours] "+r"(fours), [ahead] "+r"(ahead)                                         \
      : [sums] "r"(sums), [goes_on] "r"(static_cast<int>(goes_on)), [row] "i"(kRow * sizeof(float))                \
      : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", \
        "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23",         \
        "zmm24", "zmm25", "zmm26", "zmm27", "zmm28", "zmm29", "zmm30", "zmm31", "cc", "memory")
// clang-format on

/// sums[8][48] = a[steps][8]^T · b[steps][48], rows of sums kRow apart; with `goes_on` what stands in sums is their
/// beginning. Every sum is one chain of multiply-adds in ascending order of the steps. Reads, and does not use, one
/// step more of both. With every four steps a cache line from `ahead` on is asked for, for the second-level cache.
/// Terms<T> says what a step multiplies.
template <class T, int kRow>
[[gnu::noinline]] void register_tile(const float* a, const float* b, std::int64_t steps, bool goes_on,
                                     const float* ahead, float* sums) {
  using V = typename Terms<T>::V;
  std::int64_t fours = steps / 4;
  if constexpr (Terms<T>::kPerWord == 2) {
    NRL_TILE("vdpbf16ps");
  } else {
    NRL_TILE("vfmadd231ps");
  }
  for (std::int64_t s = 0; s < steps % 4; ++s, a += kRegisterRows, b += kRegisterColumns)
    for (int i = 0; i < kRegisterRows; ++i)
      for (int j = 0; j < kRegisterColumns; j += 16) {
        float* const sum = sums + i * kRow + j;
        store(sum, Terms<T>::multiply_add(V(a[i]), load<V>(b + j), load<V>(sum)));
      }
}

#undef NRL_TILE
#undef NRL_MULTIPLY
#undef NRL_ROW
#undef NRL_ROW_FROM_MEMORY
#undef NRL_COLUMNS
#undef NRL_STEP
#undef NRL_EACH_SUM
#undef NRL_ZERO
#undef NRL_LOAD
#undef NRL_STORE
#else
constexpr bool kHasRegisterTile = false;
#endif

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
