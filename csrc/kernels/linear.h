// Matrix products. The forward product is exact in the sense that matters here: y[m, n] is one fixed sequence of
// operations on row m of x and row n of w, so its bits do not depend on how many rows there are, on the tiling or
// on threads. (A library's product does not promise that: its kernels change with M.)
#pragma once
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"

namespace nemo_rl::kernels {

/// y[M, N] (+)= x[M, K] · w[N, K]^T + bias[N]; x and w row-major with unit stride along K.
/// Work is cut into tiles: LinearTiles(M, N).count() of them, any range may be computed at a time; `more` says that the caller means
/// to go on with tile_end and what follows it, whose weights are then asked for.
template <class T, class O>
struct LinearForwardArgs {
  const T* x;
  std::int64_t ldx;
  const T* w;
  std::int64_t ldw;
  const T* bias;  ///< nullptr: none
  O* y;
  std::int64_t ldy;
  std::int64_t M, N, K;
  bool accumulate;  ///< add to y (residual stream) instead of overwriting it
};

inline constexpr std::int64_t kLinearBlockM = 256;  ///< rows of x that stay in the second-level cache
inline constexpr std::int64_t kLinearTileN = 32;    ///< columns: whole cache lines of y, and rows of w in the first level

inline constexpr std::int64_t kLinearTileM = 32;    ///< rows: little enough that no thread waits long for another's last tile

/// Where tile number t lies: tiles go down the rows of a block, then strip by strip through its columns, then block by block.
struct LinearTiles {
  std::int64_t strips, steps, blocks;  ///< strips of columns; tiles to a strip of a block; blocks of rows
  LinearTiles(std::int64_t M, std::int64_t N)
      : strips((N + kLinearTileN - 1) / kLinearTileN),
        steps(((M < kLinearBlockM ? M : kLinearBlockM) + kLinearTileM - 1) / kLinearTileM),
        blocks((M + kLinearBlockM - 1) / kLinearBlockM) {}
  std::int64_t count() const { return strips * steps * blocks; }
  std::int64_t strip(std::int64_t t) const { return t / steps % strips; }
  std::int64_t block_row(std::int64_t t) const { return t / steps / strips * kLinearBlockM; }
  std::int64_t row(std::int64_t t) const { return block_row(t) + t % steps * kLinearTileM; }
};

template <class T, class O>
using LinearForward = void(const LinearForwardArgs<T, O>& args, std::int64_t tile_begin, std::int64_t tile_end, bool more);
NRL_DECLARE_CPU_KERNEL(linear_forward_f32, LinearForward<float, float>);
NRL_DECLARE_CPU_KERNEL(linear_forward_f64, LinearForward<double, double>);
NRL_DECLARE_CPU_KERNEL(linear_forward_bf16, LinearForward<bfloat16, bfloat16>);
NRL_DECLARE_CPU_KERNEL(linear_forward_bf16_f32, LinearForward<bfloat16, float>);

/// act[M, I] = silu(gate) · up with [gate, up] = x[M, K] · w[2I, K]^T + bias[2I]: the bits of the product into gate_up and
/// swiglu_forward of that. Work is cut into the tiles of LinearTiles(M, 2I); half
/// of a tile's columns are gates, half are ups.
template <class T>
struct LinearSwigluArgs {
  const T* x;
  std::int64_t ldx;
  const T* w;
  std::int64_t ldw;
  const T* bias;  ///< nullptr: none
  T* gate_up;     ///< contiguous [M, 2I]; nullptr: not kept
  T* act;         ///< contiguous [M, I]
  std::int64_t M, I, K;
};

template <class T>
using LinearSwiglu = void(const LinearSwigluArgs<T>& args, std::int64_t tile_begin, std::int64_t tile_end, bool more);
NRL_DECLARE_CPU_KERNEL(linear_swiglu_f32, LinearSwiglu<float>);
NRL_DECLARE_CPU_KERNEL(linear_swiglu_f64, LinearSwiglu<double>);
NRL_DECLARE_CPU_KERNEL(linear_swiglu_bf16, LinearSwiglu<bfloat16>);

/// c[M, N] (+)= a[M, K] · b[K, N], for the backward passes: a[i, k] = a_data[i * row_stride_a + k * col_stride_a], b
/// row-major with unit stride along N. Sums run over k in blocks of fixed size. Any range of row blocks may be
/// computed at a time (num_gemm_blocks(M) of them); a block's result does not depend on the others.
template <class T, class O>
struct GemmArgs {
  const T* a;
  std::int64_t row_stride_a, col_stride_a;
  const T* b;
  std::int64_t ldb;
  O* c;
  std::int64_t ldc;
  std::int64_t M, N, K;
  bool accumulate;
};

inline constexpr std::int64_t kGemmBlockM = 12;  ///< a multiple of the register tile of every capability
inline std::int64_t num_gemm_blocks(std::int64_t M) { return (M + kGemmBlockM - 1) / kGemmBlockM; }

template <class T, class O>
using Gemm = void(const GemmArgs<T, O>& args, std::int64_t block_begin, std::int64_t block_end);
NRL_DECLARE_CPU_KERNEL(gemm_f32, Gemm<float, float>);
NRL_DECLARE_CPU_KERNEL(gemm_f64, Gemm<double, double>);
NRL_DECLARE_CPU_KERNEL(gemm_bf16, Gemm<bfloat16, bfloat16>);
NRL_DECLARE_CPU_KERNEL(gemm_bf16_f32, Gemm<bfloat16, float>);

}  // namespace nemo_rl::kernels
