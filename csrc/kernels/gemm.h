// The backward products c (+)= a · b, one block of terms after another. A block of b is packed once for all threads.
// Each thread packs the rows of a that it multiplies. The result of a tile does not depend on other tiles.
#pragma once
#include <cstdint>

#include "common/bfloat16.h"
#include "common/cpu_capability.h"
#include "kernels/product_figures.h"

namespace nemo_rl::kernels {

/// a[i, k] = a_data[i * row_stride_a + k * col_stride_a], where one of the strides is 1; b is row-major with unit
/// stride along N.
template <class T>
struct GemmInput {
  const T* a;
  std::int64_t row_stride_a, col_stride_a;
  const T* b;
  std::int64_t ldb;
  std::int64_t M, N, K;
  void* packed_b = nullptr;     ///< gemm_packed_bytes(N, K, sizeof(T)), 64-byte aligned
  std::int64_t first_term = 0;  ///< whose row lies at b
};

/// Rows of a that a thread packs at a time; of other types kGemmTileM.
using GemmRows = std::int64_t();
NRL_DECLARE_TILE_KERNEL(gemm_rows_bf16, GemmRows);

/// What a block of terms of so many rows of a, or columns of b, takes when packed: with room for incomplete tiles and
/// the ends of panels.
inline std::int64_t gemm_packed_bytes(std::int64_t lines, std::int64_t K, std::int64_t size) {
  const std::int64_t terms = K < kGemmTerms ? K : kGemmTerms,
                     bytes = (lines + kGemmTileN) * (terms + 16) * (size < 4 ? 4 : size);
  return (bytes + 63) / 64 * 64;
}

/// Packs units [begin, end) of kGemmPackTerms terms of the block that begins at k0.
template <class T>
using GemmPack = void(const GemmInput<T>& input, std::int64_t k0, std::int64_t begin, std::int64_t end);
NRL_DECLARE_PAIR_KERNEL(gemm_pack_f32, GemmPack<float>);
NRL_DECLARE_PAIR_KERNEL(gemm_pack_f64, GemmPack<double>);
NRL_DECLARE_TILE_KERNEL(gemm_pack_bf16, GemmPack<bfloat16>);

/// c[M, N] (+)= a[M, K] · b[K, N].
template <class T, class O>
struct GemmArgs {
  GemmInput<T> input;
  O* c;
  std::int64_t ldc;
  bool accumulate;
  accumulate_t<T>* sums = nullptr;  ///< [M, N], for all blocks of terms but the last where O cannot hold their sums
};

/// Rows [m0, m1), at most gemm_rows, by columns [n0, n1), n0 a multiple of kGemmTileN. Blocks of terms come in
/// ascending order.
struct GemmTile {
  std::int64_t m0, m1, n0, n1, k0;
  void* packed_a;  ///< this thread's gemm_packed_bytes(gemm_rows, K, sizeof(T)), 64-byte aligned
  bool is_packed;  ///< the rows lie there, from a tile before
};
template <class T, class O>
using Gemm = void(const GemmArgs<T, O>& args, const GemmTile& tile);
NRL_DECLARE_PAIR_KERNEL(gemm_f32, Gemm<float, float>);
NRL_DECLARE_PAIR_KERNEL(gemm_f64, Gemm<double, double>);
NRL_DECLARE_TILE_KERNEL(gemm_bf16, Gemm<bfloat16, bfloat16>);
NRL_DECLARE_TILE_KERNEL(gemm_bf16_f32, Gemm<bfloat16, float>);

}  // namespace nemo_rl::kernels
