// Every measured figure of the products of a CPU in one place: how operands are cut, and from how many rows one way of
// a product gives over to another. No figure changes a bit. They were measured on two cores with AVX2, AVX-512,
// AVX-512 with bfloat16 instructions and AMX; tests/benchmarks/bench_linear.py and bench_generation.py repeat that.
//
//   rows of x, forward    way                                      figure
//   1 to 8                rows of w in the lanes                   kLinearFewRows
//   1 to 12, 64, 3 or 4   w in twelve bits, after 16 such steps    kPackedMostRows, kPackedMostRowsSingle,
//                                                                  kPackedMostRowsShort, kPackedMostRowsTiles,
//                                                                  kPackAfter
//   up to 64              each thread packs x for itself           kLinearOwnRows
//   from 96, 192 or 384   w packed too (AVX-512)                   kLinearWideRows times linear_wide_chunks
//   from 128 or 1,024     w packed too (AMX)                       kTileWideRows, kTileWideRowsOfLong
//   from 384              of the head: a tile's logits at once     kHeadProductRows
//
// kernels/cpu/product_table.h makes the ways of each type and capability of the first five rows, and checks that all of
// them add up in one order.
#pragma once
#include <cstdint>

namespace nemo_rl::kernels {

// ---------------------------------------------------------------- forward (kernels/linear.h)

inline constexpr std::int64_t kLinearTileM = 64;  ///< rows: whole panels of packed x in every capability
inline constexpr std::int64_t kLinearTileN = 48;  ///< columns: a multiple of the register tile of every capability
inline constexpr std::int64_t kSwigluTileN =
    2 * kLinearTileN;                              ///< of linear_swiglu: gates and ups by whole cache lines
inline constexpr std::int64_t kLinearFewRows = 8;  ///< up to here rows of w lie in the lanes instead of rows of x
inline constexpr std::int64_t kLinearCachedTerms = 80 * 1024;  ///< of x, for the second-level cache
/// Up to so many rows of x every thread packs them for itself: it reads lines that another core has written, as it
/// must, but none that it would have to take away from another core to write them; and nobody waits.
inline constexpr std::int64_t kLinearOwnRows = kLinearTileM;
inline constexpr std::int64_t kLinearPackedBytes = 2 << 20;  ///< of packed x at a time, for a nearby cache
inline constexpr std::int64_t kLinearPackGrain = 1'000'000;  ///< bytes of packed x that are worth a thread

inline constexpr std::int64_t kLinearWideRows = 96;             ///< of a chunk of x where w is packed, too
inline constexpr std::int64_t kLinearWideStripWords = 2 << 20;  ///< of packed w at a time, for a nearby cache
inline constexpr std::int64_t kLinearWideWords =
    1024;  ///< of a row: so many of a panel of x and a strip of w stay near
/// From so many chunks on, w is packed. That takes as long as multiplying some thirty rows. A strip of bfloat16 that is
/// widened is widened once instead of for each panel, which pays early; rows of more than 2,048 words go through the
/// near caches block by block, which pays earlier than for short ones.
constexpr std::int64_t linear_wide_chunks(bool widens, std::int64_t words) {
  if (widens) return 1;
  return words > 2048 ? 2 : 4;
}

// ---------------------------------------------------------------- weights in twelve bits (kernels/packed_weights.h)

inline constexpr std::int64_t kPackedMostRows = 12;        ///< of x: their sums with a strip fit in registers
inline constexpr std::int64_t kPackedMostRowsHalves = 16;  ///< where pairs are taken apart: half a strip at a time
inline constexpr std::int64_t kPackedMostRowsSingle = 64;  ///< there: more rows share weights that become float32
inline constexpr std::int64_t kPackedUnpackedTerms = 64;   ///< so many at a time: with rows of x in the nearest cache
inline constexpr std::int64_t kPackedMostRowsShort = 3;    ///< with AVX2, whose registers are half as long
inline constexpr std::int64_t kPackedMostRowsTiles = 4;    ///< where tiles multiply: more rows have work enough
inline constexpr std::int64_t kPackedAheadBytes = 2048;    ///< asked for ahead: about as long as memory takes
inline constexpr std::int64_t kPackAfter = 16;  ///< steps of few rows, by which reading the weights as they lie has
                                                ///< lost about the time that the copy costs

// ---------------------------------------------------------------- the vocabulary head (model/vocabulary_head.cpp)

inline constexpr std::int64_t kHeadRowBlock = 64;      ///< rows: their logits for a tile stay in the second-level cache
inline constexpr std::int64_t kHeadProductRows = 384;  ///< from here on a tile's logits are one product of all rows
inline constexpr std::int64_t kHeadBackwardRows =
    2048;  ///< rows whose gradient of a tile stays in the last-level cache
inline constexpr std::int64_t kHeadRowLogits = std::int64_t{1}
                                               << 24;         ///< where whole rows are needed: 64 MiB of float32
inline constexpr std::int64_t kHeadFusedLogits = 56'000'000;  ///< that wait for their loss: 224 MB at most,
inline constexpr std::int64_t kHeadFusedRows =
    1024;  ///< for no more rows than this: all of d_w passes by once for so many

// ---------------------------------------------------------------- backward (kernels/gemm.h)

inline constexpr std::int64_t kGemmTerms = 1024;  ///< of a block: that many are summed in registers before c is updated
inline constexpr std::int64_t kGemmTileM =
    96;  ///< rows: once packed they stay in the second-level cache beside columns
inline constexpr std::int64_t kGemmTileN = 96;  ///< columns: as many as any capability's register tile, or a multiple
inline constexpr std::int64_t kGemmPackTerms = 32;  ///< whole rows of b that are packed together: reading memory in the
                                                    ///< order of its addresses is fastest
inline constexpr std::int64_t kGemmPackSteps = 16;  ///< of every panel of a in turn: their pages stay in the
                                                    ///< translation cache

// ---------------------------------------------------------------- tiles (kernels/tiles/)

/// From so many rows on, rows of x are operand A and w is packed for all of them. That takes as long as multiplying
/// some rows, of long rows more, since those of x leave the second-level cache.
inline constexpr std::int64_t kTileWideRows = 128, kTileWideRowsOfLong = 1024, kTileWideLongRow = 2048;
inline constexpr std::int64_t kTileWideChunk = 256;         ///< rows of x at a time, at most
inline constexpr std::int64_t kTileWideTerms = 700 * 1024;  ///< terms of them, for the second-level cache
inline constexpr std::int64_t kTileWideColumns = 96;        ///< of a strip of w: three pairs of tiles
inline constexpr std::int64_t kTileGemmRows = 192;  ///< of the backward products: packed in the second-level cache,
inline constexpr std::int64_t kTileGemmSteps = 16;  ///< with so many steps of 32 columns of b in the first

static_assert(kLinearFewRows < kPackedMostRows && kPackedMostRows <= kLinearOwnRows && kLinearOwnRows <= kLinearTileM);
static_assert(kHeadRowBlock <= kLinearTileM);

}  // namespace nemo_rl::kernels
