// The products by tiles (kernels/tiles/) give the bits of the instruction's rules (tile_rules.h): by the tile in
// software on every machine with AVX2, and by AMX's where it can be had.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels/aligned_room.h"
#include "kernels/gemm.h"
#include "kernels/linear.h"
#include "kernels/packed_weights.h"
#include "kernels/tile_rules.h"

namespace nemo_rl::kernels {
namespace {

float term(const std::vector<bfloat16>& values, std::int64_t at) {
  return static_cast<float>(values[static_cast<std::size_t>(at)]);
}

/// One output.
float by_the_rules(const std::vector<bfloat16>& x, std::int64_t row, const std::vector<bfloat16>& w,
                   std::int64_t column, std::int64_t K, float sum = 0) {
  return tile_sum(
      K, [&](std::int64_t k) { return term(w, column * K + k); }, [&](std::int64_t k) { return term(x, row * K + k); },
      sum);
}

struct TileKernels {
  const char* name;
  LinearPack<bfloat16>* pack;
  LinearForward<bfloat16, float>* forward;
  LinearSwiglu<bfloat16>* swiglu;
  LinearStripFloats* strip_floats;
  LinearWideOf* wide;
  LinearPackWeights<bfloat16>* pack_weights;
  LinearForwardWide<bfloat16, float>* forward_wide;
  LinearSwigluWide<bfloat16>* swiglu_wide;
  GemmPack<bfloat16>* gemm_pack;
  Gemm<bfloat16, float>* gemm;
  GemmRows* gemm_rows;
  PackedWeightsRows* packed_rows;
  PackedWeightsRowsPack* packed_pack_rows;
  PackedWeightsForward<float>* packed_forward;
  PackedWeightsSwiglu* packed_swiglu;
};

std::vector<TileKernels> kernels_of_this_machine() {
  std::vector<TileKernels> all;
#if defined(__x86_64__)
#define NRL_TILE_KERNELS(variant, name)                                                                   \
  {                                                                                                       \
    name, variant::linear_pack_bf16, variant::linear_forward_bf16_f32, variant::linear_swiglu_bf16,       \
        variant::linear_strip_floats_bf16, variant::linear_wide_bf16, variant::linear_pack_weights_bf16,  \
        variant::linear_forward_wide_bf16_f32, variant::linear_swiglu_wide_bf16, variant::gemm_pack_bf16, \
        variant::gemm_bf16_f32, variant::gemm_rows_bf16, variant::packed_weights_rows,                    \
        variant::packed_weights_pack_rows, variant::packed_weights_forward_bf16_f32,                      \
        variant::packed_weights_swiglu_bf16                                                               \
  }
  if (has_software_tiles()) all.push_back(NRL_TILE_KERNELS(software_tiles, "software"));
  if (has_software_tiles_avx512()) all.push_back(NRL_TILE_KERNELS(software_tiles_avx512, "software, AVX-512"));
  if (has_amx_tiles()) all.push_back(NRL_TILE_KERNELS(amx, "amx"));
#endif
  return all;
}

std::vector<float> product(const TileKernels& with, const std::vector<bfloat16>& x, const std::vector<bfloat16>& w,
                           std::int64_t M, std::int64_t N, std::int64_t K) {
  Room packed(linear_packed_bytes(M, K, 2)), room(with.strip_floats(M, K, kLinearTileN) * 4);
  const LinearInput<bfloat16> input{x.data(), K, M, K, packed.get(), static_cast<float*>(room.get())};
  with.pack(input, 0, (M + kLinearTileM - 1) / kLinearTileM);
  std::vector<float> y(static_cast<std::size_t>(M * N), NAN);
  with.forward({input, w.data(), K, nullptr, y.data(), N, N, false}, 0, LinearTiles(M, N, K).count(), false);
  return y;
}

/// w packed for many rows: rows_from(i) gives the first of each kLinearTileN columns, and how many of them exist.
template <class RowsFrom>
void pack_strips(const TileKernels& with, std::int64_t strips, std::int64_t K, const RowsFrom& rows_from, float* out) {
  const std::int64_t words = with.wide(K).words;
  for (std::int64_t i = 0; i < strips * with.wide(K).columns / kLinearTileN; ++i) {
    const auto [rows, have] = rows_from(i);
    with.pack_weights(rows, K, have, K, out + i * words * kLinearTileN);
  }
}

/// Calls kernel(tile) for all chunks of rows with all strips.
template <class Kernel>
void in_chunks(const TileKernels& with, std::int64_t M, std::int64_t K, std::int64_t strips, const float* packed_w,
               const Kernel& kernel) {
  const auto wide = with.wide(K);
  Room room(static_cast<std::size_t>(linear_wide_packed(wide.rows, wide.words)) * 4);
  for (std::int64_t m = 0; m < M; m += wide.rows)
    kernel({m, std::min(M, m + wide.rows), 0, strips, packed_w, static_cast<float*>(room.get()), false});
}

}  // namespace

TEST(TileProducts, KernelForManyRowsIsBitIdenticalToTheKernelForFewRows) {
  struct Shape {
    std::int64_t M, N, K;
  };
  for (const auto& with : kernels_of_this_machine())
    for (const Shape& s : {Shape{1, 96, 32}, {40, 100, 65}, {288, 53, 64}, {270, 192, 96}, {128, 17, 2048}}) {
      const auto x = drawn(s.M * s.K, Values::spread, 9), w = drawn(s.N * s.K, Values::any_bits, 10);
      const auto wide = with.wide(s.K);
      const std::int64_t strips = (s.N + wide.columns - 1) / wide.columns;
      Room packed(static_cast<std::size_t>(strips * wide.columns * wide.words) * 4);
      auto* const to = static_cast<float*>(packed.get());
      pack_strips(
          with, strips, s.K,
          [&](std::int64_t i) {
            const std::int64_t n = i * kLinearTileN;
            return std::pair{w.data() + std::min(n, s.N - 1) * s.K, std::max<std::int64_t>(0, s.N - n)};
          },
          to);
      std::vector<float> y(static_cast<std::size_t>(s.M * s.N), NAN);
      in_chunks(with, s.M, s.K, strips, to, [&](const LinearWideTile& tile) {
        with.forward_wide({{x.data(), s.K, s.M, s.K, nullptr}, w.data(), s.K, nullptr, y.data(), s.N, s.N, false},
                          tile);
      });
      const auto expected = product(with, x, w, s.M, s.N, s.K);
      for (std::size_t i = 0; i < y.size(); ++i)
        expect_bits(y[i], expected[i], with.name, static_cast<std::int64_t>(i));
    }
}

TEST(TileProducts, SwigluKernelForManyRowsIsBitIdenticalToTheKernelForFewRows) {
  constexpr std::int64_t M = 290, I = 61, K = 72, kHalf = kSwigluTileN / 2;
  const auto x = drawn(M * K, Values::normal, 11), w = drawn(2 * I * K, Values::normal, 12);
  const auto strips = (2 * I + kSwigluTileN - 1) / kSwigluTileN;
  for (const auto& with : kernels_of_this_machine()) {
    Room packed_x(linear_packed_bytes(M, K, 2)), room(with.strip_floats(M, K, kSwigluTileN) * 4),
        packed_w(static_cast<std::size_t>(strips * kSwigluTileN * with.wide(K).words) * 4);
    const LinearInput<bfloat16> input{x.data(), K, M, K, packed_x.get(), static_cast<float*>(room.get())};
    std::vector<bfloat16> few(static_cast<std::size_t>(M * I)), many(few.size());
    with.pack(input, 0, (M + kLinearTileM - 1) / kLinearTileM);
    with.swiglu({input, w.data(), K, nullptr, nullptr, few.data(), I, Gate::silu, w.data() + I * K}, 0,
                LinearTiles(M, 2 * I, K, kSwigluTileN).count(), false);
    auto* const to = static_cast<float*>(packed_w.get());
    pack_strips(
        with, strips, K,
        [&](std::int64_t i) {  // gates, ups, gates, ups, ...
          const std::int64_t n = i / 2 * kHalf;
          return std::pair{w.data() + (i % 2 * I + n) * K, I - n};
        },
        to);
    in_chunks(with, M, K, strips, to, [&](const LinearWideTile& tile) {
      with.swiglu_wide({input, w.data(), K, nullptr, nullptr, many.data(), I, Gate::silu, w.data() + I * K}, tile);
    });
    ASSERT_EQ(std::memcmp(few.data(), many.data(), few.size() * sizeof(bfloat16)), 0) << with.name;
  }
}

TEST(TileProducts, MatrixProductIsBitIdenticalToAScalarReference) {
  struct Shape {
    std::int64_t M, N, K;
  };
  for (const auto& with : kernels_of_this_machine())
    for (const Shape& s : {Shape{1, 16, 32},
                           {1, 48, 96},
                           {3, 50, 40},
                           {16, 17, 31},
                           {17, 96, 64},
                           {33, 100, 65},
                           {64, 48, 2048},
                           {70, 47, 96},
                           {130, 49, 33}})
      for (const Values values : {Values::normal, Values::spread, Values::any_bits}) {
        const auto x = drawn(s.M * s.K, values, 1), w = drawn(s.N * s.K, values, 2);
        const auto y = product(with, x, w, s.M, s.N, s.K);
        for (std::int64_t i = 0; i < s.M * s.N; ++i)
          expect_bits(y[static_cast<std::size_t>(i)], by_the_rules(x, i / s.N, w, i % s.N, s.K), with.name, i);
      }
}

TEST(TileProducts, EachRowOfAProductIsBitIdenticalForAnyNumberOfRows) {
  constexpr std::int64_t kMost = 300, N = 53, K = 104;
  const auto x = drawn(kMost * K, Values::spread, 3), w = drawn(N * K, Values::spread, 4);
  for (const auto& with : kernels_of_this_machine()) {
    const auto all = product(with, x, w, kMost, N, K);
    for (std::int64_t M = 1; M < kMost; ++M) {
      const auto some = product(with, x, w, M, N, K);
      ASSERT_EQ(std::memcmp(some.data(), all.data(), some.size() * sizeof(float)), 0)
          << with.name << ", " << M << " rows";
    }
  }
}

TEST(TileProducts, SwigluKernelRoundsTheSumsOfTheMatrixProduct) {
  constexpr std::int64_t M = 37, I = 61, K = 72;
  const auto x = drawn(M * K, Values::normal, 5), w = drawn(2 * I * K, Values::normal, 6);
  for (const auto& with : kernels_of_this_machine()) {
    const auto sums = product(with, x, w, M, 2 * I, K);
    Room packed(linear_packed_bytes(M, K, 2)), room(with.strip_floats(M, K, kSwigluTileN) * 4);
    const LinearInput<bfloat16> input{x.data(), K, M, K, packed.get(), static_cast<float*>(room.get())};
    with.pack(input, 0, 1);
    std::vector<bfloat16> gate_up(static_cast<std::size_t>(M * 2 * I)), act(static_cast<std::size_t>(M * I));
    with.swiglu({input, w.data(), K, nullptr, gate_up.data(), act.data(), I, Gate::silu, w.data() + I * K}, 0,
                LinearTiles(M, 2 * I, K, kSwigluTileN).count(), false);
    for (std::size_t i = 0; i < gate_up.size(); ++i)
      ASSERT_EQ(gate_up[i].bits, bfloat16(sums[i]).bits) << with.name << " " << i;
    for (std::int64_t m = 0; m < M; ++m)
      for (std::int64_t i = 0; i < I; ++i) {
        const auto gate = static_cast<double>(static_cast<float>(gate_up[static_cast<std::size_t>(m * 2 * I + i)])),
                   up = static_cast<double>(static_cast<float>(gate_up[static_cast<std::size_t>(m * 2 * I + I + i)]));
        const double expected = gate / (1 + std::exp(-gate)) * up;
        EXPECT_NEAR(static_cast<double>(static_cast<float>(act[static_cast<std::size_t>(m * I + i)])), expected,
                    0.005 * std::abs(expected) + 1e-6);
      }
  }
}

#if defined(__x86_64__)
namespace {

/// w in twelve bits; of gated, strips of gates and of ups in turn.
struct PackedCopy {
  Room strips, patches;
  PackedMatrix matrix;
  PackedCopy(PackedWeightsPack* pack, const std::vector<bfloat16>& w, std::int64_t N, std::int64_t K, bool gated)
      : strips(N / kPackedStrip * packed_strip_bytes(K) + kPackedAheadBytes + 192),
        patches(N / kPackedStrip * packed_patches(K) * static_cast<std::int64_t>(sizeof(PackedPatch))),
        matrix{static_cast<std::byte*>(strips.get()), static_cast<PackedPatch*>(patches.get()), K} {
    for (std::int64_t s = 0; s < N / kPackedStrip; ++s) {
      const std::int64_t row = gated ? s / 2 * kPackedStrip + s % 2 * (N / 2) : s * kPackedStrip;
      EXPECT_TRUE(pack(w.data() + row * K, K, matrix, s));
    }
  }
};

/// Weights of a model, here and there one whose exponent lies far below the others', a zero or a denormal.
std::vector<bfloat16> weights_with_patches(std::int64_t count, unsigned seed) {
  auto w = drawn(count, Values::normal, seed);
  for (std::size_t i = 7; i < w.size(); i += 307) w[i] = bfloat16(static_cast<float>(w[i]) * 1e-9f);
  for (std::size_t i = 3; i < w.size(); i += 509) w[i].bits = static_cast<std::uint16_t>(i / 509 % 5);
  return w;
}

}  // namespace

TEST(PackedWeights, ProductsOfVectorsWithPackedWeightsAreBitIdenticalToProductsWithTheWeights) {
  struct Kernels {
    const char* name;
    PackedWeightsPack* pack;
    PackedWeightsRows* most_rows;
    PackedWeightsRowsPack* pack_rows;
    PackedWeightsForward<float>* packed;
    LinearPack<bfloat16>* linear_pack;
    LinearForward<bfloat16, float>* linear;
    LinearStripFloats* strip_floats;
  };
  std::vector<Kernels> all;
#define NRL_PACKED_KERNELS(variant)                                                                          \
  variant::packed_weights_rows, variant::packed_weights_pack_rows, variant::packed_weights_forward_bf16_f32, \
      variant::linear_pack_bf16, variant::linear_forward_bf16_f32, variant::linear_strip_floats_bf16
  if (has_software_tiles())  // which need the same
    all.push_back({"AVX2", avx2::packed_weights_pack, NRL_PACKED_KERNELS(avx2)});
  if (has_software_tiles_avx512()) {
    all.push_back({"AVX-512", avx512::packed_weights_pack, NRL_PACKED_KERNELS(avx512)});
    if (__builtin_cpu_supports("avx512bf16"))
      all.push_back({"bfloat16", avx512::packed_weights_pack, NRL_PACKED_KERNELS(avx512_bf16)});
  }
  for (const auto& with : all) {
    ASSERT_GT(with.most_rows(), 0) << with.name;
    for (std::int64_t M = 1; M <= with.most_rows(); ++M)
      for (const std::int64_t K : {8, 72, 576}) {
        constexpr std::int64_t N = 96;
        const auto x = drawn(M * K, Values::spread, 15), w = weights_with_patches(N * K, 16);
        const PackedCopy copy(with.pack, w, N, K, false);
        const std::int64_t floats = with.strip_floats(M, K, kLinearTileN);
        Room rows(linear_packed_bytes(M, K, 2)), room(floats * 4);
        const LinearInput<bfloat16> input{x.data(), K,          M,
                                          K,        rows.get(), floats > 0 ? static_cast<float*>(room.get()) : nullptr};
        std::vector<float> y(static_cast<std::size_t>(M * N), NAN), expected = y;
        with.pack_rows(input);
        with.packed({input, nullptr, 0, nullptr, y.data(), N, N, false}, copy.matrix, 0, N / kPackedStrip);
        with.linear_pack(input, 0, 1);
        with.linear({input, w.data(), K, nullptr, expected.data(), N, N, false}, 0, LinearTiles(M, N, K).count(),
                    false);
        EXPECT_EQ(std::memcmp(y.data(), expected.data(), y.size() * 4), 0) << with.name << " " << M << " " << K;
      }
  }
}

TEST(TileProducts, ProductWithWeightsPackedIn12BitsIsBitIdenticalToAScalarReference) {
  for (const auto& with : kernels_of_this_machine())
    for (std::int64_t M = 1; M <= with.packed_rows(); ++M)
      for (const std::int64_t K : {8, 32, 72, 576})
        for (const Values values : {Values::normal, Values::spread, Values::any_bits}) {
          constexpr std::int64_t N = 64;
          const auto x = drawn(M * K, values, 13), w = weights_with_patches(N * K, 14);
          const PackedCopy copy(avx512::packed_weights_pack, w, N, K, false);
          Room rows(linear_packed_bytes(M, K, 2));
          const LinearInput<bfloat16> input{x.data(), K, M, K, rows.get()};
          with.packed_pack_rows(input);
          std::vector<float> y(static_cast<std::size_t>(M * N), NAN);
          with.packed_forward({input, nullptr, 0, nullptr, y.data(), N, N, false}, copy.matrix, 0, N / kPackedStrip);
          for (std::int64_t i = 0; i < M * N; ++i)
            expect_bits(y[static_cast<std::size_t>(i)], by_the_rules(x, i / N, w, i % N, K), with.name, i);
        }
}

TEST(TileProducts, SwigluWithWeightsPackedIn12BitsIsBitIdenticalToSwigluWithBfloat16Weights) {
  constexpr std::int64_t I = 96, K = 104;
  const auto w = weights_with_patches(2 * I * K, 15);
  for (const auto& with : kernels_of_this_machine())
    for (std::int64_t M = 1; M <= with.packed_rows(); ++M) {
      const auto x = drawn(M * K, Values::normal, 16);
      const PackedCopy copy(avx512::packed_weights_pack, w, 2 * I, K, true);
      Room rows(linear_packed_bytes(M, K, 2)), room(with.strip_floats(M, K, kSwigluTileN) * 4);
      LinearInput<bfloat16> input{x.data(), K, M, K, rows.get(), static_cast<float*>(room.get())};
      std::vector<bfloat16> packed(static_cast<std::size_t>(M * I)), act(packed.size());
      with.packed_pack_rows(input);
      with.packed_swiglu({input, nullptr, 0, nullptr, nullptr, packed.data(), I, Gate::silu}, copy.matrix, 0,
                         I / kPackedStrip);
      with.pack(input, 0, 1);
      with.swiglu({input, w.data(), K, nullptr, nullptr, act.data(), I, Gate::silu, w.data() + I * K}, 0,
                  LinearTiles(M, 2 * I, K, kSwigluTileN).count(), false);
      ASSERT_EQ(std::memcmp(packed.data(), act.data(), act.size() * sizeof(bfloat16)), 0) << with.name << " " << M;
    }
}
#endif

TEST(TileProducts, GemmOfTheBackwardPassIsBitIdenticalToAScalarReference) {
  struct Shape {
    std::int64_t M, N, K;
  };
  for (const auto& with : kernels_of_this_machine())
    for (const Shape& s :
         {Shape{1, 1, 1}, {5, 40, 3}, {97, 33, 70}, {40, 130, 1100}, {33, 17, 2049}, {288, 64, 64}, {64, 96, 1056}})
      for (const bool transposed : {false, true})
        for (const bool accumulate : {false, true}) {
          const auto a = drawn(s.M * s.K, Values::spread, 7), b = drawn(s.K * s.N, Values::normal, 8);
          // as rows of terms, which is how by_the_rules reads them
          std::vector<bfloat16> rows(a.size()), columns(b.size());
          for (std::int64_t k = 0; k < s.K; ++k) {
            for (std::int64_t m = 0; m < s.M; ++m)
              rows[static_cast<std::size_t>(m * s.K + k)] =
                  a[static_cast<std::size_t>(transposed ? k * s.M + m : m * s.K + k)];
            for (std::int64_t n = 0; n < s.N; ++n)
              columns[static_cast<std::size_t>(n * s.K + k)] = b[static_cast<std::size_t>(k * s.N + n)];
          }
          const std::int64_t most = with.gemm_rows();
          Room packed_a(gemm_packed_bytes(most, s.K, 2)), packed_b(gemm_packed_bytes(s.N, s.K, 2));
          GemmInput<bfloat16> input{a.data(), transposed ? 1 : s.K, transposed ? s.M : 1, b.data(), s.N, s.M, s.N, s.K};
          input.packed_b = packed_b.get();
          std::vector<float> c(static_cast<std::size_t>(s.M * s.N), 0.5f);
          for (std::int64_t k0 = 0; k0 < s.K; k0 += kGemmTerms) {
            with.gemm_pack(input, k0, 0, (std::min(kGemmTerms, s.K - k0) + kGemmPackTerms - 1) / kGemmPackTerms);
            for (std::int64_t m0 = 0; m0 < s.M; m0 += most)
              with.gemm({input, c.data(), s.N, accumulate},
                        {m0, std::min(m0 + most, s.M), 0, s.N, k0, packed_a.get(), false});
          }
          for (std::int64_t i = 0; i < s.M * s.N; ++i) {
            const float expected = by_the_rules(columns, i % s.N, rows, i / s.N, s.K, accumulate ? 0.5f : 0.0f);
            expect_bits(c[static_cast<std::size_t>(i)], expected, with.name, i);
          }
        }
}

}  // namespace nemo_rl::kernels
