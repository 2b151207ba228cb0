// Weights in blocks: 32 neighbouring weights of a row share one scale in front of them. The blocks of q8_0 and q4_0 are
// ggml's, with a scale in float16. Those of nf4 hold bitsandbytes' weights, with a scale in float32.
//
//   q8_0   34 bytes   32 int8 q;                                           weight = scale · q
//   q4_0   18 bytes   16 bytes: weight i in the low, i + 16 in the high half;  weight = scale · (q - 8), q in [0, 15]
//   nf4    20 bytes   the same;                                                weight = scale · kNormalFloat[q]
//
// A weight is rounded once: to float32 the product of nf4, which those of ggml do not need, and to bfloat16. A scale of
// nf4 nearer to 0 than kNormalFloatLeast is 0, because some instructions that round to bfloat16 read subnormal numbers
// as 0.
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
/// Bytes of a row of K weights, a multiple of kBlockTerms.
constexpr std::int64_t block_row_bytes(BlockFormat format, std::int64_t K) {
  return K / kBlockTerms * block_bytes(format);
}

/// out[rows, K] = the weights of rows that follow one another at `blocks`.
template <class T>
using UnpackBlocks = void(BlockFormat format, const std::byte* blocks, std::int64_t rows, std::int64_t K, T* out,
                          std::int64_t ldo);
NRL_DECLARE_PAIR_KERNEL(unpack_blocks_f32, UnpackBlocks<float>);
NRL_DECLARE_PAIR_KERNEL(unpack_blocks_bf16, UnpackBlocks<bfloat16>);

/// Makes the blocks of w[rows, K].
template <class T>
using PackBlocks = void(BlockFormat format, const T* w, std::int64_t ldw, std::int64_t rows, std::int64_t K,
                        std::byte* blocks);
NRL_DECLARE_PAIR_KERNEL(pack_blocks_f32, PackBlocks<float>);
NRL_DECLARE_PAIR_KERNEL(pack_blocks_bf16, PackBlocks<bfloat16>);

/// Rows of w in blocks, which follow one another.
struct WeightBlocks {
  BlockFormat format;
  const std::byte* at;
};

/// The most rows of x whose products unpack w between the tiles that multiply it, instead of a strip of w first. 0:
/// this capability has no such kernels.
using BlockProductRows = std::int64_t();
NRL_DECLARE_TILE_KERNEL(block_product_rows, BlockProductRows);

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
