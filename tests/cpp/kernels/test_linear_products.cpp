// The products of this machine's kernels, whatever the processor: right, and a row has the same bits among any number
// of rows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/aligned_room.h"
#include "kernels/gemm.h"
#include "kernels/linear.h"

namespace nemo_rl::kernels {
namespace {

template <class T>
std::vector<T> drawn(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<T> out(static_cast<std::size_t>(count));
  for (auto& v : out) v = static_cast<T>(normal(random));
  return out;
}

template <class T>
double at(const std::vector<T>& values, std::int64_t i) {
  if constexpr (std::is_same_v<T, bfloat16>)
    return static_cast<double>(static_cast<float>(values[static_cast<std::size_t>(i)]));
  else return static_cast<double>(values[static_cast<std::size_t>(i)]);
}

template <class T, class O>
std::vector<O> product(LinearPack<T>* pack, LinearForward<T, O>* forward, const std::vector<T>& x,
                       const std::vector<T>& w, std::int64_t M, std::int64_t N, std::int64_t K) {
  const std::int64_t floats = std::is_same_v<T, bfloat16> ? linear_strip_floats_bf16(M, K, kLinearTileN) : 0;
  Room packed(linear_packed_bytes(M, K, sizeof(T))), room(floats * 4);
  const LinearInput<T> input{x.data(), K, M, K, packed.get(), floats > 0 ? static_cast<float*>(room.get()) : nullptr};
  pack(input, 0, (M + kLinearTileM - 1) / kLinearTileM);
  std::vector<O> y(static_cast<std::size_t>(M * N));
  forward({input, w.data(), K, nullptr, y.data(), N, N, false}, 0, LinearTiles(M, N, K).count(), false);
  return y;
}

template <class T, class O>
void check_forward(LinearPack<T>* pack, LinearForward<T, O>* forward, double tolerance) {
  constexpr std::int64_t kRows = 150, N = 61, K = 135;
  const auto x = drawn<T>(kRows * K, 1), w = drawn<T>(N * K, 2);
  const auto all = product<T, O>(pack, forward, x, w, kRows, N, K);
  for (std::int64_t i = 0; i < kRows * N; ++i) {
    double sum = 0;
    for (std::int64_t k = 0; k < K; ++k) sum += at(x, i / N * K + k) * at(w, i % N * K + k);
    ASSERT_NEAR(at(all, i), sum, tolerance) << i;
  }
  for (std::int64_t M = 1; M < kRows; ++M) {
    const auto some = product<T, O>(pack, forward, x, w, M, N, K);
    ASSERT_EQ(std::memcmp(some.data(), all.data(), some.size() * sizeof(O)), 0) << M << " rows";
  }
}

template <class T, class O>
void check_backward(GemmPack<T>* pack, Gemm<T, O>* gemm, double tolerance) {
  constexpr std::int64_t M = 101, N = 45, K = 1100;
  const auto a = drawn<T>(M * K, 3), b = drawn<T>(K * N, 4);
  for (const bool transposed : {false, true}) {
    Room packed_a(gemm_packed_bytes(kGemmTileM, K, sizeof(T))), packed_b(gemm_packed_bytes(N, K, sizeof(T)));
    GemmInput<T> input{a.data(), transposed ? 1 : K, transposed ? M : 1, b.data(), N, M, N, K};
    input.packed_b = packed_b.get();
    std::vector<O> c(static_cast<std::size_t>(M * N), O(1));
    for (std::int64_t k0 = 0; k0 < K; k0 += kGemmTerms) {
      pack(input, k0, 0, (std::min(kGemmTerms, K - k0) + kGemmPackTerms - 1) / kGemmPackTerms);
      for (std::int64_t m0 = 0; m0 < M; m0 += kGemmTileM)
        gemm({input, c.data(), N, true}, {m0, std::min(m0 + kGemmTileM, M), 0, N, k0, packed_a.get(), false});
    }
    for (std::int64_t i = 0; i < M * N; ++i) {
      double sum = 1;
      for (std::int64_t k = 0; k < K; ++k)
        sum += at(a, transposed ? k * M + i / N : i / N * K + k) * at(b, k * N + i % N);
      ASSERT_NEAR(at(c, i), sum, tolerance) << i;
    }
  }
}

}  // namespace

TEST(LinearProducts, ForwardMatchesADoubleReferenceAndEachRowIsIndependentOfTheBatchSize) {
  check_forward<float, float>(linear_pack_f32, linear_forward_f32, 1e-4);
  check_forward<double, double>(linear_pack_f64, linear_forward_f64, 1e-12);
  check_forward<bfloat16, float>(linear_pack_bf16, linear_forward_bf16_f32, 1e-4);
}

TEST(LinearProducts, GemmOfTheBackwardPassMatchesADoubleReference) {
  check_backward<float, float>(gemm_pack_f32, gemm_f32, 1e-3);
  check_backward<double, double>(gemm_pack_f64, gemm_f64, 1e-11);
  check_backward<bfloat16, float>(gemm_pack_bf16, gemm_bf16_f32, 1e-3);
}

}  // namespace nemo_rl::kernels
