// Matrix products. In the forward product, y[m, n] is one chain of multiply-adds along K over row m of x and row n of
// w. So its bits do not depend on the number of rows, on the tiling or on threads. (A library does not promise that:
// its kernels change with M.)
#pragma once
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"
#include "kernels/product_figures.h"
#include "kernels/swiglu.h"

namespace nemo_rl::kernels {

/// x[M, K], row-major with unit stride along K, and the place of its packed copy, which linear_pack writes before the
/// tiles are computed.
template <class T>
struct LinearInput {
  const T* x;
  std::int64_t ldx;
  std::int64_t M, K;
  void* packed;                 ///< linear_packed_bytes(M, K, sizeof(T)), 64-byte aligned
  float* strip_room = nullptr;  ///< room of this thread alone for a strip of w in another layout: linear_strip_floats;
                                ///< nullptr: w is read as it lies
};

/// Room for rows of x, and for a word more with every block of weights (kernels/cpu/block_codes.h).
inline std::int64_t linear_packed_bytes(std::int64_t M, std::int64_t K, std::int64_t size) {
  const std::int64_t rows = (M + kLinearTileM - 1) / kLinearTileM * kLinearTileM;
  return rows * (K + K / 32 + 16) * (size < 4 ? 4 : size);
}

/// Where tile number t lies: tiles go down the rows of a block, then strip by strip through its columns, then block by
/// block. A block of rows stays in the second-level cache while the columns pass by.
struct LinearTiles {
  std::int64_t block_rows, strips, steps,
      blocks;  ///< rows of a block; strips of columns; tiles to a strip of a block; blocks
  LinearTiles(std::int64_t M, std::int64_t N, std::int64_t K, std::int64_t tile_n = kLinearTileN)
      : block_rows(kLinearCachedTerms / (K > 0 ? K : 1) / kLinearTileM * kLinearTileM) {
    if (block_rows > 4 * kLinearTileM) block_rows = 4 * kLinearTileM;
    if (block_rows < kLinearTileM) block_rows = kLinearTileM;
    strips = (N + tile_n - 1) / tile_n;
    steps = ((M < block_rows ? M : block_rows) + kLinearTileM - 1) / kLinearTileM;
    blocks = (M + block_rows - 1) / block_rows;
  }
  std::int64_t count() const { return strips * steps * blocks; }
  std::int64_t strip(std::int64_t t) const { return t / steps % strips; }
  std::int64_t row(std::int64_t t) const { return t / steps / strips * block_rows + t % steps * kLinearTileM; }
};

/// With many rows, w is packed as well ("wide"). The packing costs as much as multiplying some dozen rows. Then sums
/// are formed as in the backward products. Each thread packs the chunks of x that it multiplies; strips of w are packed
/// for all threads.
struct LinearWideTile {
  std::int64_t m0, m1;                  ///< rows
  std::int64_t strip_begin, strip_end;  ///< of LinearWide::columns; of linear_swiglu: kSwigluTileN, half of them gates
  const float* packed_w;  ///< strips from strip_begin on, as linear_pack_weights packs them; of linear_swiglu: gates,
                          ///< then ups
  float* packed_x;        ///< this thread's room for linear_wide_packed(LinearWide::rows, words)
  bool is_packed;         ///< the rows lie there, from a tile before
};
/// Whether and how that is done, for rows of K terms.
struct LinearWide {
  std::int64_t from_rows = INT64_MAX;  ///< a product of so many rows and more is faster wide; where this capability has
                                       ///< no such kernel, none is
  std::int64_t words = 0;              ///< of 32 bits that a row takes: a float32 for each term, or a pair of bfloat16
  std::int64_t rows = kLinearWideRows;  ///< of a chunk of x
  std::int64_t columns = kLinearTileN;  ///< of a strip of w, but of linear_swiglu
};
using LinearWideOf = LinearWide(std::int64_t K);
NRL_DECLARE_PAIR_KERNEL(linear_wide_f32, LinearWideOf);
NRL_DECLARE_TILE_KERNEL(linear_wide_bf16, LinearWideOf);

/// Words that so many rows, or columns, take: with the step that is read beyond the last.
inline std::int64_t linear_wide_packed(std::int64_t lines, std::int64_t words) {
  return (lines * words + kLinearTileN + 15) / 16 * 16;
}

/// out = kLinearTileN rows of w, turned: [words][kLinearTileN]; of tiles: [kLinearTileN / 16][words][16]. Rows from
/// `rows` on are zero.
template <class T>
using LinearPackWeights = void(const T* w, std::int64_t ldw, std::int64_t rows, std::int64_t K, float* out);
NRL_DECLARE_PAIR_KERNEL(linear_pack_weights_f32, LinearPackWeights<float>);
NRL_DECLARE_TILE_KERNEL(linear_pack_weights_bf16, LinearPackWeights<bfloat16>);

/// Floats of room for a strip of w that is widened to float32, or laid out as tiles, before the rows meet it; 0 where
/// so many rows are multiplied with w as it lies. The same bits either way.
using LinearStripFloats = std::int64_t(std::int64_t M, std::int64_t K, std::int64_t tile_n);
NRL_DECLARE_TILE_KERNEL(linear_strip_floats_bf16, LinearStripFloats);

/// Packs rows [kLinearTileM * begin, kLinearTileM * end) of x.
template <class T>
using LinearPack = void(const LinearInput<T>& input, std::int64_t begin, std::int64_t end);
NRL_DECLARE_PAIR_KERNEL(linear_pack_f32, LinearPack<float>);
NRL_DECLARE_PAIR_KERNEL(linear_pack_f64, LinearPack<double>);
NRL_DECLARE_TILE_KERNEL(linear_pack_bf16, LinearPack<bfloat16>);

/// y[M, N] (+)= x[M, K] · w[N, K]^T + bias[N]; w row-major with unit stride along K.
/// Work is cut into tiles: LinearTiles(M, N, K).count() of them, any range may be computed at a time; `more` says that
/// the caller means to go on with tile_end and what follows it, whose weights are then asked for.
/// W is T, or float where weights in blocks are not rounded to bfloat16 (kernels/weight_blocks.h).
template <class T, class O, class W = T>
struct LinearForwardArgs {
  LinearInput<T> input;
  const W* w;
  std::int64_t ldw;
  const T* bias;  ///< nullptr: none
  O* y;
  std::int64_t ldy;
  std::int64_t N;
  bool accumulate;               ///< add to y (residual stream) instead of overwriting it
  std::int64_t first_strip = 0;  ///< whose rows lie at w
};

template <class T, class O, class W = T>
using LinearForward = void(const LinearForwardArgs<T, O, W>& args, std::int64_t tile_begin, std::int64_t tile_end,
                           bool more);
NRL_DECLARE_PAIR_KERNEL(linear_forward_f32, LinearForward<float, float>);
NRL_DECLARE_PAIR_KERNEL(linear_forward_f64, LinearForward<double, double>);
NRL_DECLARE_TILE_KERNEL(linear_forward_bf16, LinearForward<bfloat16, bfloat16>);
NRL_DECLARE_TILE_KERNEL(linear_forward_bf16_f32, LinearForward<bfloat16, float>);
NRL_DECLARE_CPU_KERNEL(linear_forward_mixed_bf16, LinearForward<bfloat16, bfloat16, float>);
NRL_DECLARE_CPU_KERNEL(linear_forward_mixed_bf16_f32, LinearForward<bfloat16, float, float>);

/// The same sums, wide; args.input.packed and args.w are not used.
template <class T, class O>
using LinearForwardWide = void(const LinearForwardArgs<T, O>& args, const LinearWideTile& tile);
NRL_DECLARE_PAIR_KERNEL(linear_forward_wide_f32, LinearForwardWide<float, float>);
NRL_DECLARE_TILE_KERNEL(linear_forward_wide_bf16, LinearForwardWide<bfloat16, bfloat16>);
NRL_DECLARE_TILE_KERNEL(linear_forward_wide_bf16_f32, LinearForwardWide<bfloat16, float>);

/// act[M, I] = f(gate) · up, f of `activation`, with [gate, up] = x[M, K] · w[2I, K]^T + bias[2I]: the bits of the
/// product into gate_up and swiglu_forward of that. Work is cut into LinearTiles(M, 2I, K, kSwigluTileN); half of a
/// tile's columns are gates, half are ups.
template <class T, class W = T>
struct LinearSwigluArgs {
  LinearInput<T> input;
  const W* w;
  std::int64_t ldw;
  const T* bias;  ///< nullptr: none
  T* gate_up;     ///< contiguous [M, 2I]; nullptr: not kept
  T* act;         ///< contiguous [M, I]
  std::int64_t I;
  Gate activation;               ///< silu or gelu_tanh
  const W* up = nullptr;         ///< rows of ups, ldw apart as the gates at w
  std::int64_t first_strip = 0;  ///< whose rows lie at w and at up
};

template <class T, class W = T>
using LinearSwiglu = void(const LinearSwigluArgs<T, W>& args, std::int64_t tile_begin, std::int64_t tile_end,
                          bool more);
NRL_DECLARE_PAIR_KERNEL(linear_swiglu_f32, LinearSwiglu<float>);
NRL_DECLARE_PAIR_KERNEL(linear_swiglu_f64, LinearSwiglu<double>);
NRL_DECLARE_TILE_KERNEL(linear_swiglu_bf16, LinearSwiglu<bfloat16>);
NRL_DECLARE_CPU_KERNEL(linear_swiglu_mixed_bf16, LinearSwiglu<bfloat16, float>);
template <class T>
using LinearSwigluWide = void(const LinearSwigluArgs<T>& args, const LinearWideTile& tile);
NRL_DECLARE_PAIR_KERNEL(linear_swiglu_wide_f32, LinearSwigluWide<float>);
NRL_DECLARE_TILE_KERNEL(linear_swiglu_wide_bf16, LinearSwigluWide<bfloat16>);

}  // namespace nemo_rl::kernels
