// bfloat16 weights in twelve bits each, without loss. A step of few rows takes as long as reading the weights from
// memory. Three quarters of the bytes take nearly three quarters of the time. A product gives the same bits as one that
// reads the weights themselves.
//
// The exponents of a strip of rows lie close together. Four bits say which of the fifteen highest exponents a weight
// has, or that it is zero (or subnormal). Sign and mantissa take the other eight bits. About one weight in some
// thousands is smaller than that; it is stored as it is, as a patch.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/linear.h"

namespace nemo_rl::kernels {

inline constexpr std::int64_t kPackedStrip = 32;  ///< rows of w
inline constexpr std::int64_t kPackedTerms = 8;   ///< K is a multiple of these
inline constexpr std::int64_t kPackedMostTerms = std::int64_t{4} * 0xffff;

/// A pair of weights of one row as they are, and their place: the block of four words in the strip, and the word and
/// row in the block.
struct PackedPatch {
  std::uint16_t block, place;
  std::uint32_t pair;
};

/// A packed matrix: strips that follow one another, and of each strip its patches, in ascending order.
struct PackedMatrix {
  std::byte* strips;  ///< packed_strip_bytes(K) each; 64-byte aligned
  PackedPatch*
      patches;  ///< packed_patches(K) each: first the strip's lowest exponent (`pair`), last one of block 0xffff
  std::int64_t K;
};
inline std::int64_t packed_strip_bytes(std::int64_t K) { return kPackedStrip * K * 3 / 2; }
inline std::int64_t packed_patches(std::int64_t K) { return K / 4 + 2; }

/// Packs 32 rows of w as strip `strip`. Returns false if there is no room for all patches.
using PackedWeightsPack = bool(const bfloat16* w, std::int64_t ldw, const PackedMatrix& packed, std::int64_t strip);
NRL_DECLARE_PAIR_KERNEL(packed_weights_pack, PackedWeightsPack);

/// The most rows of x for which packed weights are faster on this capability. 0: it has no such kernels.
using PackedWeightsRows = std::int64_t();
NRL_DECLARE_TILE_KERNEL(packed_weights_rows, PackedWeightsRows);

/// Lays out the rows of x, at most so many, as the products with packed weights read them.
using PackedWeightsRowsPack = void(const LinearInput<bfloat16>& input);
NRL_DECLARE_TILE_KERNEL(packed_weights_pack_rows, PackedWeightsRowsPack);

/// linear_forward of columns of strips [begin, end); args.w is not read.
template <class O>
using PackedWeightsForward = void(const LinearForwardArgs<bfloat16, O>& args, const PackedMatrix& packed,
                                  std::int64_t begin, std::int64_t end);
NRL_DECLARE_TILE_KERNEL(packed_weights_forward_bf16, PackedWeightsForward<bfloat16>);
NRL_DECLARE_TILE_KERNEL(packed_weights_forward_bf16_f32, PackedWeightsForward<float>);

/// linear_swiglu of pairs of strips [begin, end): gates are in even strips, their ups in the odd ones after them.
using PackedWeightsSwiglu = void(const LinearSwigluArgs<bfloat16>& args, const PackedMatrix& packed, std::int64_t begin,
                                 std::int64_t end);
NRL_DECLARE_TILE_KERNEL(packed_weights_swiglu_bf16, PackedWeightsSwiglu);

}  // namespace nemo_rl::kernels
