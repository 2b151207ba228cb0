// Weights in blocks (kernels/weight_blocks.h): tiles keep the blocks of a file, and products with few rows of x have
// the bits of the tile instruction's rules (tile_rules.h) with the unpacked weights.
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

/// Blocks with every code, whose scales are powers of two: `exponent` gives that of row n and block b.
int exponent(std::int64_t n, std::int64_t b) { return static_cast<int>((n + 3 * b) % 7) - 5; }

std::vector<std::byte> drawn_blocks(BlockFormat format) {
  std::mt19937 random(7);
  std::vector<std::byte> rows(static_cast<std::size_t>(kRows * block_row_bytes(format, K)));
  for (auto& byte : rows) byte = static_cast<std::byte>(random());
  for (std::int64_t block = 0; block < kRows * K / kBlockTerms; ++block) {
    const int power = exponent(block / (K / kBlockTerms), block % (K / kBlockTerms));
    const float single = std::ldexp(1.0f, power);
    const auto half = static_cast<std::uint16_t>((power + 15) << 10);
    std::memcpy(&rows[static_cast<std::size_t>(block * block_bytes(format))],
                format == BlockFormat::nf4 ? static_cast<const void*>(&single) : &half,
                static_cast<std::size_t>(scale_bytes(format)));
  }
  return rows;
}

/// Weight k of row n by the definition of the format.
float weight(BlockFormat format, const std::vector<std::byte>& rows, std::int64_t n, std::int64_t k) {
  const std::int64_t b = k / kBlockTerms, i = k % kBlockTerms;
  const std::byte* const codes =
      &rows[static_cast<std::size_t>(n * block_row_bytes(format, K) + b * block_bytes(format) + scale_bytes(format))];
  const float scale = std::ldexp(1.0f, exponent(n, b));
  if (format == BlockFormat::q8_0) return scale * static_cast<float>(static_cast<std::int8_t>(codes[i]));
  const int code = static_cast<int>(codes[i % 16]) >> (i < 16 ? 0 : 4) & 15;
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
  LinearPack<bfloat16>* pack;
  LinearForwardBlocks<float>* forward;
  BlockProductRows* most_rows;
};

std::vector<FewRows> tile_kernels() {
  std::vector<FewRows> all;
#if defined(__x86_64__)
#define NRL_FEW_ROWS(variant)                                                                                 \
  {                                                                                                           \
    #variant, variant::linear_pack_bf16, variant::linear_forward_blocks_bf16_f32, variant::block_product_rows \
  }
  if (has_software_tiles()) all.push_back(NRL_FEW_ROWS(software_tiles));
  if (has_software_tiles_avx512()) all.push_back(NRL_FEW_ROWS(software_tiles_avx512));
  if (has_amx_tiles()) all.push_back(NRL_FEW_ROWS(amx));
#endif
  return all;
}

}  // namespace

TEST(WeightBlocks, TilesKeepTheBlocksOfAFile) {
  for (const auto format : kFormats) {
    const auto rows = drawn_blocks(format), tiles = tiles_of(format, rows);
    std::vector<std::byte> read(rows.size());
    read_block_rows(format, tiles.data(), 0, kRows, K, read.data());
    EXPECT_EQ(read, rows) << static_cast<int>(format);
  }
}

TEST(WeightBlocks, UnpackedWeightsAreScaleTimesCode) {
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

TEST(WeightBlocks, ProductsOfFewRowsByTilesHaveTheBitsOfTheRules) {
  for (const auto& with : tile_kernels())
    for (const auto format : kFormats) {
      const auto rows = drawn_blocks(format), tiles = tiles_of(format, rows);
      for (const std::int64_t M : {1, 7, 16, 17, 32}) {
        ASSERT_LE(M, with.most_rows());
        const auto x = drawn(M * K, Values::spread, 3);
        Room packed(linear_packed_bytes(M, K, 2));
        const LinearInput<bfloat16> input{x.data(), K, M, K, packed.get()};
        with.pack(input, 0, (M + kLinearTileM - 1) / kLinearTileM);
        std::vector<float> y(static_cast<std::size_t>(M * kRows), NAN);
        with.forward({input, nullptr, 0, nullptr, y.data(), kRows, kRows, false}, {format, tiles.data()}, 0,
                     (kRows + kLinearTileN - 1) / kLinearTileN, false);
        for (std::int64_t i = 0; i < M * kRows; ++i) {
          const float expected = tile_sum(
              K, [&](std::int64_t k) { return static_cast<float>(bfloat16(weight(format, rows, i % kRows, k))); },
              [&](std::int64_t k) { return static_cast<float>(x[static_cast<std::size_t>(i / kRows * K + k)]); }, 0.0f);
          ASSERT_EQ(y[static_cast<std::size_t>(i)], expected)
              << with.name << " " << static_cast<int>(format) << " " << i;
        }
      }
    }
}

}  // namespace nemo_rl::kernels
