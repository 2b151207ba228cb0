// Small dense matrices in strips: sixteen columns lie together, so element (i, j) of a matrix with `rows` rows is at
// (j / 16 * rows + i) * 16 + j % 16. The state of a gated delta net is stored like this. Rows and columns of all
// matrices here are multiples of 16.
#pragma once
#include "kernels/cpu/vec.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// Rows and strips of sums that the registers hold.
template <class A>
constexpr int kSumRows = kRegisterBytes > 32 ? 8
                         : sizeof(A) == 4    ? 4
                                             : 2;
template <class A>
constexpr int kSumStrips = kRegisterBytes > 32 && sizeof(A) == 4 ? 2 : 1;

/// Rows [m, m + kSumRows) of W strips of c [M, 16 * W], which are b's [K, 16 * W]. `a` as in multiply.
template <bool kTurned, int W, class A>
NRL_VEC void multiply_rows(const A* a, const A* b, A* c, std::int64_t M, std::int64_t K, std::int64_t m, bool adds) {
  using V = Vec<A, 16>;
  constexpr int kRows = kSumRows<A>;
  V sums[kRows][W];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
    for (int w = 0; w < W; ++w) sums[i][w] = adds ? load<V>(c + (w * M + m + i) * 16) : V{};
  const A* own = kTurned ? a + m / 16 * K * 16 + m % 16 : a + m * 16;
  for (std::int64_t k0 = 0; k0 < K; k0 += 16, own += 16 * (kTurned ? 16 : M))
    for (int k = 0; k < 16; ++k, b += 16) {
      V columns[W];
      for (int w = 0; w < W; ++w) columns[w] = load<V>(b + w * K * 16);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        V element(kTurned ? own[k * 16 + i] : own[i * 16 + k]);
        for (int w = 0; w < W; ++w) sums[i][w] = mul_add(element, columns[w], sums[i][w]);
      }
    }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
    for (int w = 0; w < W; ++w) store(c + (w * M + m + i) * 16, sums[i][w]);
}

template <bool kTurned, int W, class A>
void multiply_strips(const A* a, const A* b, A* c, std::int64_t M, std::int64_t K, bool adds) {
  for (std::int64_t m = 0; m < M; m += kSumRows<A>) multiply_rows<kTurned, W>(a, b, c, M, K, m, adds);
}

/// c [M, N] = a * b, or += a * b with `adds`; b [K, N], a [M, K], or its transpose [K, M] if kTurned. A sum is one
/// chain of multiply-adds in ascending order of k.
template <bool kTurned, class A>
void multiply(const A* a, const A* b, A* c, std::int64_t M, std::int64_t N, std::int64_t K, bool adds) {
  constexpr int W = kSumStrips<A>;
  std::int64_t n = 0;
  for (; n + 16 * W <= N; n += 16 * W) multiply_strips<kTurned, W>(a, b + n * K, c + n * M, M, K, adds);
  for (; n < N; n += 16) multiply_strips<kTurned, 1>(a, b + n * K, c + n * M, M, K, adds);
}

/// to [N, M] = the transpose of from [M, N].
template <class A>
void turn(const A* from, std::int64_t M, std::int64_t N, A* to) {
  using V = ShortVec<A>;
  constexpr int L = V::kLanes;
  for (std::int64_t n = 0; n < N; n += L)
    for (std::int64_t m = 0; m < M; m += L) {
      V rows[L];
      for (int i = 0; i < L; ++i) rows[i] = load<V>(from + (n / 16 * M + m + i) * 16 + n % 16);
      transpose(rows);
      for (int i = 0; i < L; ++i) store(to + (m / 16 * N + n + i) * 16 + m % 16, rows[i]);
    }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
