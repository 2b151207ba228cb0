// Weights in blocks: 32 neighbouring weights of a row share one scale in front of them. The blocks of q8_0 and q4_0 are
// ggml's, with a scale in float16. Those of nf4 hold bitsandbytes' weights, with a scale in float32.
//
// A matrix lies in tiles: blocks b of 16 rows, first their scales, then their codes in the order of code_place, in
// which products with few rows of x read them: from one stream, as they go into registers. A row of tiles takes the
// bytes of its blocks; the last one is padded to 16 rows.
//
//   q8_0   34 bytes   32 int8 q;                                           weight = scale · q
//   q4_0   18 bytes   16 bytes: weight i in the low, i + 16 in the high half;  weight = scale · (q - 8), q in [0, 15]
//   nf4    20 bytes   the same;                                                weight = scale · kNormalFloat[q]
//
// A weight is rounded to float32, which those of ggml do not need, and then to bfloat16 where a product needs it. A
// scale of nf4 nearer to 0 than kNormalFloatLeast is 0, because some instructions that round to bfloat16 read subnormal
// numbers as 0.
//
// A block of q8_0 or q4_0 is made as ggml's reference makes it: for q8_0 scale = max|w| / 127 and q = round(w / scale),
// halves away from zero; for q4_0 scale = m / -8, m the weight of largest magnitude with its sign, and q = trunc(w /
// scale + 8.5), at most 15. w / scale is w times the float32 reciprocal of the scale before that is rounded to float16.
//
// bitsandbytes gives 64 weights of nf4 the scale max|w|. A block made here has a scale of its own, of either sign,
// because the codes are not symmetric. Each of kNormalFloatPlaces is tried as w / scale of the weight m of largest
// magnitude. Let c be the nearest codes' values: the scale that fits them best is sum(w c) / sum(c c), and the squared
// error is least where sum(w c)² / sum(c c) is largest. q is then the code nearest to w / scale, the lower of two.
#pragma once
#include <cstddef>
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"
#include "common/host_device.h"
#include "kernels/linear.h"

namespace nemo_rl::kernels {

enum class BlockFormat : std::uint8_t { q8_0, q4_0, nf4 };

inline constexpr std::int64_t kBlockTerms = 32;  ///< weights of a block
inline constexpr float kNormalFloatLeast = 0x1p-120f;
/// The codes of nf4: sixteen quantiles of the normal distribution, divided by the largest.
constexpr float kNormalFloat[16] = {-1.0f,
                                    -0.6961928009986877f,
                                    -0.5250730514526367f,
                                    -0.39491748809814453f,
                                    -0.28444138169288635f,
                                    -0.18477343022823334f,
                                    -0.09105003625154495f,
                                    0.0f,
                                    0.07958029955625534f,
                                    0.16093020141124725f,
                                    0.24611230194568634f,
                                    0.33791524171829224f,
                                    0.44070982933044434f,
                                    0.5626170039176941f,
                                    0.7229568362236023f,
                                    1.0f};
/// Around the outermost codes.
constexpr float kNormalFloatPlaces[] = {-1.18f, -1.05f, -0.95f, 0.95f, 1.05f, 1.18f};
constexpr std::int64_t block_bytes(BlockFormat format) {
  return format == BlockFormat::q8_0 ? 34 : format == BlockFormat::q4_0 ? 18 : 20;
}
constexpr std::int64_t scale_bytes(BlockFormat format) { return format == BlockFormat::nf4 ? 4 : 2; }
/// Bytes of a row of K weights, a multiple of kBlockTerms.
constexpr std::int64_t block_row_bytes(BlockFormat format, std::int64_t K) {
  return K / kBlockTerms * block_bytes(format);
}

inline constexpr std::int64_t kBlockTileRows = 16;
constexpr std::int64_t block_tile_bytes(BlockFormat format) { return kBlockTileRows * block_bytes(format); }
/// Bytes of a matrix.
constexpr std::int64_t block_matrix_bytes(BlockFormat format, std::int64_t rows, std::int64_t K) {
  return (rows + kBlockTileRows - 1) / kBlockTileRows * kBlockTileRows * block_row_bytes(format, K);
}
/// Where byte i of the codes of row r lies among the codes of a tile. q4_0: 32-bit lanes of a row each, with the even
/// bytes first. The others: of every eight bytes of a row first the even, then the odd ones.
constexpr std::int64_t code_place(BlockFormat format, std::int64_t r, std::int64_t i) {
  if (format == BlockFormat::q4_0) return i / 4 * 64 + r * 4 + i % 2 * 2 + i % 4 / 2;
  return (r / 8 * ((block_bytes(format) - scale_bytes(format)) / 8) + i / 8) * 64 + r % 8 * 8 + i % 2 * 4 + i % 8 / 2;
}

/// The number whose float16 these bits are.
NRL_INLINE float half_value(std::uint16_t bits) {
  const std::uint32_t sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return __builtin_bit_cast(float, sign | 0x7f800000u | magnitude << 13);
  const float value = magnitude < 0x400u ? static_cast<float>(magnitude) * 0x1p-24f
                                         : __builtin_bit_cast(float, (magnitude << 13) + (112u << 23));
  return sign ? -value : value;
}

/// out[rows, K] = the weights of rows [first, first + rows) of the matrix at `tiles`.
template <class T>
using UnpackBlocks = void(BlockFormat format, const std::byte* tiles, std::int64_t first, std::int64_t rows,
                          std::int64_t K, T* out, std::int64_t ldo);
NRL_DECLARE_PAIR_KERNEL(unpack_blocks_f32, UnpackBlocks<float>);
NRL_DECLARE_PAIR_KERNEL(unpack_blocks_bf16, UnpackBlocks<bfloat16>);

/// Rows [first, first + rows) of the matrix at `tiles` = the blocks of w[rows, K].
template <class T>
using PackBlocks = void(BlockFormat format, const T* w, std::int64_t ldw, std::int64_t first, std::int64_t rows,
                        std::int64_t K, std::byte* tiles);
NRL_DECLARE_PAIR_KERNEL(pack_blocks_f32, PackBlocks<float>);
NRL_DECLARE_PAIR_KERNEL(pack_blocks_bf16, PackBlocks<bfloat16>);
/// Writes rows [first, first + rows) of the matrix at `tiles` from `blocks`, where block follows block as in a file; or
/// reads them.
using WriteBlockRows = void(BlockFormat format, const std::byte* blocks, std::int64_t first, std::int64_t rows,
                            std::int64_t K, std::byte* tiles);
NRL_DECLARE_PAIR_KERNEL(write_block_rows, WriteBlockRows);
using ReadBlockRows = void(BlockFormat format, const std::byte* tiles, std::int64_t first, std::int64_t rows,
                           std::int64_t K, std::byte* blocks);
NRL_DECLARE_PAIR_KERNEL(read_block_rows, ReadBlockRows);

/// w in blocks.
struct WeightBlocks {
  BlockFormat format;
  const std::byte* at;
};

/// Whether products with x in bfloat16 take weights as float32: where the processor has no instructions for bfloat16,
/// which would need them rounded.
using BlockWeightsAreSingle = bool();
NRL_DECLARE_TILE_KERNEL(block_weights_are_single, BlockWeightsAreSingle);

/// The most rows of x whose products read w in blocks, instead of a strip of w that is unpacked first. 0: this
/// capability has no such kernels.
using BlockProductRows = std::int64_t(BlockFormat format);
NRL_DECLARE_TILE_KERNEL(block_product_rows, BlockProductRows);

/// Packs x for these, as linear_pack does.
using LinearPackForBlocks = void(BlockFormat format, const LinearInput<bfloat16>& input, std::int64_t begin,
                                 std::int64_t end);
NRL_DECLARE_TILE_KERNEL(linear_pack_for_blocks, LinearPackForBlocks);

/// linear_forward and linear_swiglu of up to so many rows of x, with all rows of w at `w`; args.w is not read.
template <class O>
using LinearForwardBlocks = void(const LinearForwardArgs<bfloat16, O>& args, const WeightBlocks& w,
                                 std::int64_t tile_begin, std::int64_t tile_end, bool more);
NRL_DECLARE_TILE_KERNEL(linear_forward_blocks_bf16, LinearForwardBlocks<bfloat16>);
NRL_DECLARE_TILE_KERNEL(linear_forward_blocks_bf16_f32, LinearForwardBlocks<float>);
using LinearSwigluBlocks = void(const LinearSwigluArgs<bfloat16>& args, const WeightBlocks& w, std::int64_t tile_begin,
                                std::int64_t tile_end, bool more);
NRL_DECLARE_TILE_KERNEL(linear_swiglu_blocks_bf16, LinearSwigluBlocks);

}  // namespace nemo_rl::kernels
