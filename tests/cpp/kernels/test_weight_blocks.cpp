// Weights in blocks (kernels/weight_blocks.h): tiles keep the blocks of a file, and products with few rows of x have
// the bits of those with the unpacked weights, by the tile instruction's rules (tile_rules.h), by the same processor's
// product of bfloat16, or, where it has none, by one chain of multiply-adds in float32; those of q8_0 and q4_0 on AVX2
// by the chains of codes that kernels/cpu/block_codes.h defines.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/aligned_room.h"
#include "kernels/tile_rules.h"
#include "kernels/weight_blocks.h"

namespace nemo_rl::kernels {
namespace {

constexpr BlockFormat kFormats[] = {BlockFormat::q8_0, BlockFormat::q4_0, BlockFormat::nf4};
constexpr std::int64_t kRows = 53, K = 96;

/// The bits of the scale of row n and block b in float16: of either sign, with few zeros among its ten last bits.
std::uint16_t scale_bits(std::int64_t n, std::int64_t b) {
  const std::int64_t sign = n % 3 == 1, exponent = (n + 3 * b) % 7 + 10, mantissa = (389 * n + 57 * b) % 1024;
  return static_cast<std::uint16_t>(sign << 15 | exponent << 10 | mantissa);
}
float scale_of(std::int64_t n, std::int64_t b) {
  const unsigned bits = scale_bits(n, b);
  const float magnitude =
      std::ldexp(1.0f + static_cast<float>(bits % 1024) / 1024, static_cast<int>(bits >> 10 & 31) - 15);
  return bits >> 15 ? -magnitude : magnitude;
}

std::vector<std::byte> drawn_blocks(BlockFormat format) {
  std::mt19937 random(7);
  std::vector<std::byte> rows(static_cast<std::size_t>(kRows * block_row_bytes(format, K)));
  for (auto& byte : rows) byte = static_cast<std::byte>(random());
  for (std::int64_t block = 0; block < kRows * K / kBlockTerms; ++block) {
    const std::int64_t n = block / (K / kBlockTerms), b = block % (K / kBlockTerms);
    const float single = scale_of(n, b);
    const std::uint16_t half = scale_bits(n, b);
    std::memcpy(&rows[static_cast<std::size_t>(block * block_bytes(format))],
                format == BlockFormat::nf4 ? static_cast<const void*>(&single) : &half,
                static_cast<std::size_t>(scale_bytes(format)));
  }
  return rows;
}

/// The code of weight k of row n.
int code_of(BlockFormat format, const std::vector<std::byte>& rows, std::int64_t n, std::int64_t k) {
  const std::int64_t b = k / kBlockTerms, i = k % kBlockTerms;
  const std::byte* const codes =
      &rows[static_cast<std::size_t>(n * block_row_bytes(format, K) + b * block_bytes(format) + scale_bytes(format))];
  if (format == BlockFormat::q8_0) return static_cast<std::int8_t>(codes[i]);
  return static_cast<int>(codes[i % 16]) >> (i < 16 ? 0 : 4) & 15;
}

/// Weight k of row n by the definition of the format.
float weight(BlockFormat format, const std::vector<std::byte>& rows, std::int64_t n, std::int64_t k) {
  const float scale = scale_of(n, k / kBlockTerms);
  const int code = code_of(format, rows, n, k);
  if (format == BlockFormat::q8_0) return scale * static_cast<float>(code);
  return scale * (format == BlockFormat::nf4 ? kNormalFloat[code] : static_cast<float>(code - 8));
}

/// The matrix in tiles, written in parts that begin and end within tiles.
std::vector<std::byte> tiles_of(BlockFormat format, const std::vector<std::byte>& rows) {
  std::vector<std::byte> tiles(static_cast<std::size_t>(block_matrix_bytes(format, kRows, K)));
  const std::int64_t bounds[] = {0, 5, 37, kRows}, bytes = block_row_bytes(format, K);
  for (int i = 0; i < 3; ++i)
    write_block_rows(format, &rows[static_cast<std::size_t>(bounds[i] * bytes)], bounds[i], bounds[i + 1] - bounds[i],
                     K, tiles.data());
  return tiles;
}

struct FewRows {
  const char* name;
  LinearPackForBlocks* pack;
  LinearForwardBlocks<float>* forward;
  BlockProductRows* most_rows;
  LinearForward<bfloat16, float>* unpacked = nullptr;  ///< null: the rules of tiles
  bool single = false;                                 ///< weights stay float32
};

/// One chain of multiply-adds.
template <class Of>
float chain(const Of& term) {
  float sum = 0;
  for (std::int64_t k = 0; k < K; ++k) sum = std::fma(term(k).first, term(k).second, sum);
  return sum;
}

/// Row n of w times x, by codes.
float sum_of_codes(BlockFormat format, const std::vector<std::byte>& rows, std::int64_t n, const bfloat16* x) {
  const bool bytes = format == BlockFormat::q8_0;
  const int runs = bytes ? 8 : 4, places = bytes ? 4 : 8, bits = bytes ? 8 : 4, zero = bytes ? 128 : 8;
  float total = 0;
  for (std::int64_t b = 0; b < K / kBlockTerms; ++b) {
    const auto term = [&](int i) { return static_cast<float>(x[b * kBlockTerms + i]); };
    float lanes[4] = {};
    for (int quarter = 0; quarter < 4; ++quarter)
      for (int i = 0; i < 4; ++i) lanes[i] += term(4 * quarter + i) + term(16 + 4 * quarter + i);
    float sum = static_cast<float>(-zero) * ((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]));
    for (int run = 0; run < runs; ++run)
      for (int place = 0; place < places; ++place) {
        const int i =
            bytes ? run / 2 * 8 + run % 2 + 2 * place : 4 * run + (const int[]){0, 2, 1, 3}[place / 2] + place % 2 * 16;
        const int shift = place + 1 < places ? bits * place : 0;
        const int code = code_of(format, rows, n, b * kBlockTerms + i) + (bytes ? zero : 0);
        sum = std::fma(std::ldexp(static_cast<float>(code), shift), std::ldexp(term(i), -shift), sum);
      }
    total = std::fma(sum, scale_of(n, b), total);
  }
  return total;
}

std::vector<FewRows> few_rows_kernels() {
  std::vector<FewRows> all;
#if defined(__x86_64__)
#define NRL_FEW_ROWS(variant) \
  #variant, variant::linear_pack_for_blocks, variant::linear_forward_blocks_bf16_f32, variant::block_product_rows
  if (has_software_tiles()) {  // which need the same
    all.push_back({NRL_FEW_ROWS(avx2), nullptr, true});
    all.push_back({NRL_FEW_ROWS(software_tiles)});
  }
  if (has_software_tiles_avx512()) {
    all.push_back({NRL_FEW_ROWS(software_tiles_avx512)});
    if (__builtin_cpu_supports("avx512bf16"))
      all.push_back({NRL_FEW_ROWS(avx512_bf16), avx512_bf16::linear_forward_bf16_f32});
  }
  if (has_amx_tiles()) all.push_back({NRL_FEW_ROWS(amx)});
#endif
  return all;
}

}  // namespace

TEST(WeightBlocks, QuantisedBlocksStoredInTilesAreReadBackUnchanged) {
  for (const auto format : kFormats) {
    const auto rows = drawn_blocks(format), tiles = tiles_of(format, rows);
    std::vector<std::byte> read(rows.size());
    read_block_rows(format, tiles.data(), 0, kRows, K, read.data());
    EXPECT_EQ(read, rows) << static_cast<int>(format);
  }
}

TEST(WeightBlocks, DequantisedWeightsAreScaleTimesCode) {
  for (const auto format : kFormats) {
    const auto rows = drawn_blocks(format), tiles = tiles_of(format, rows);
    for (const std::int64_t first : {0, 3, 16}) {
      const std::int64_t count = kRows - first - 1;
      std::vector<float> single(static_cast<std::size_t>(count * K));
      std::vector<bfloat16> half(single.size());
      unpack_blocks_f32(format, tiles.data(), first, count, K, single.data(), K);
      unpack_blocks_bf16(format, tiles.data(), first, count, K, half.data(), K);
      for (std::size_t i = 0; i < single.size(); ++i) {
        const auto at = static_cast<std::int64_t>(i);
        const float expected = weight(format, rows, first + at / K, at % K);
        ASSERT_EQ(single[i], expected) << static_cast<int>(format) << " " << first << " " << i;
        ASSERT_EQ(static_cast<float>(half[i]), static_cast<float>(bfloat16(expected))) << first << " " << i;
      }
    }
  }
}

TEST(WeightBlocks, ProductsWithQuantisedWeightsAreBitIdenticalToTheirDefinition) {
  for (const auto& with : few_rows_kernels())
    for (const auto format : kFormats) {
      const auto rows = drawn_blocks(format), tiles = tiles_of(format, rows);
      std::vector<bfloat16> w;
      std::vector<float> single;
      for (std::int64_t i = 0; i < kRows * K; ++i) {
        single.push_back(weight(format, rows, i / K, i % K));
        w.emplace_back(single.back());
      }
      ASSERT_GE(with.most_rows(format), kLinearFewRows) << with.name;
      for (const std::int64_t M : {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 24, 32, 65, 300}) {
        if (M > with.most_rows(format)) continue;
        const auto x = drawn(M * K, Values::spread, 3);
        Room packed(linear_packed_bytes(M, K, 2));
        const LinearInput<bfloat16> input{x.data(), K, M, K, packed.get()};
        with.pack(format, input, 0, (M + kLinearTileM - 1) / kLinearTileM);
        std::vector<float> y(static_cast<std::size_t>(M * kRows), NAN), expected = y;
        with.forward({input, nullptr, 0, nullptr, y.data(), kRows, kRows, false}, {format, tiles.data()}, 0,
                     LinearTiles(M, kRows, K).count(), false);
        if (with.unpacked)
          with.unpacked({input, w.data(), K, nullptr, expected.data(), kRows, kRows, false}, 0,
                        LinearTiles(M, kRows, K).count(), false);
        for (std::int64_t i = 0; i < M * kRows; ++i) {
          const auto at = [](const auto& values, std::int64_t place) {
            return static_cast<float>(values[static_cast<std::size_t>(place)]);
          };
          if (with.single && format != BlockFormat::nf4)
            expected[static_cast<std::size_t>(i)] =
                sum_of_codes(format, rows, i % kRows, &x[static_cast<std::size_t>(i / kRows * K)]);
          else if (with.single)
            expected[static_cast<std::size_t>(i)] = chain(
                [&](std::int64_t k) { return std::pair(at(single, i % kRows * K + k), at(x, i / kRows * K + k)); });
          else if (!with.unpacked)
            expected[static_cast<std::size_t>(i)] = tile_sum(
                K, [&](std::int64_t k) { return at(w, i % kRows * K + k); },
                [&](std::int64_t k) { return at(x, i / kRows * K + k); }, 0.0f);
          expect_bits(at(y, i), at(expected, i), with.name, i);
        }
      }
    }
}

#if defined(__x86_64__)
TEST(WeightBlocks, MixedProductsAreChainsOfMultiplyAddsInFloat32) {
  struct Mixed {
    const char* name;
    LinearPack<bfloat16>* pack;
    LinearForward<bfloat16, float, float>* forward;
  };
  std::vector<Mixed> all;
  if (has_software_tiles()) all.push_back({"avx2", avx2::linear_pack_bf16, avx2::linear_forward_mixed_bf16_f32});
  if (has_software_tiles_avx512())
    all.push_back({"avx512", avx512::linear_pack_bf16, avx512::linear_forward_mixed_bf16_f32});
  const auto rows = drawn_blocks(BlockFormat::q8_0);
  std::vector<float> w;
  for (std::int64_t i = 0; i < kRows * K; ++i) w.push_back(weight(BlockFormat::q8_0, rows, i / K, i % K));
  for (const auto& with : all)
    for (const std::int64_t M : {1, 8, 9, 33, 65}) {
      const auto x = drawn(M * K, Values::spread, 3);
      Room packed(linear_packed_bytes(M, K, 2));
      const LinearInput<bfloat16> input{x.data(), K, M, K, packed.get()};
      with.pack(input, 0, (M + kLinearTileM - 1) / kLinearTileM);
      std::vector<float> y(static_cast<std::size_t>(M * kRows), NAN);
      with.forward({input, w.data(), K, nullptr, y.data(), kRows, kRows, false}, 0, LinearTiles(M, kRows, K).count(),
                   false);
      for (std::int64_t i = 0; i < M * kRows; ++i)
        expect_bits(y[static_cast<std::size_t>(i)], chain([&](std::int64_t k) {
                      return std::pair(w[static_cast<std::size_t>(i % kRows * K + k)],
                                       static_cast<float>(x[static_cast<std::size_t>(i / kRows * K + k)]));
                    }),
                    with.name, i);
    }
}
#endif

}  // namespace nemo_rl::kernels
