// Weights in blocks (kernels/weight_blocks.h) on CUDA: unpacked for the products, and as a table of embeddings. Each
// weight is one product in float32, so its bits are those of the CPU's kernels.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/model_launchers.h"

namespace nemo_rl::kernels {
namespace {

constexpr int kHalf = static_cast<int>(kBlockTerms) / 2;  ///< a thread makes weights i and i + kHalf of a block
constexpr int kThreads = static_cast<int>(kBlockTileRows) * kHalf;
constexpr std::int64_t kBlocksEach = 16;  ///< of a row, by one block of threads

/// kNormalFloat as an argument: device code cannot index a constant of the host.
struct Levels {
  float of[16];
  Levels() { std::copy(kNormalFloat, kNormalFloat + 16, of); }
};

/// Weights i and i + kHalf of row r of a tile.
template <BlockFormat kFormat>
__device__ __forceinline__ void two_weights(const std::byte* tile, int r, int i, const Levels& levels, float (&w)[2]) {
  const auto* const codes = reinterpret_cast<const std::uint8_t*>(tile) + kBlockTileRows * scale_bytes(kFormat);
  if constexpr (kFormat == BlockFormat::nf4) {
    const float scale = reinterpret_cast<const float*>(tile)[r];
    const unsigned both = codes[code_place(kFormat, r, i)];
    w[0] = levels.of[both & 15u] * scale;
    w[1] = levels.of[both >> 4] * scale;
  } else {
    const float scale = half_value(reinterpret_cast<const std::uint16_t*>(tile)[r]);
    int q[2];
    if constexpr (kFormat == BlockFormat::q8_0) {
      q[0] = static_cast<std::int8_t>(codes[code_place(kFormat, r, i)]);
      q[1] = static_cast<std::int8_t>(codes[code_place(kFormat, r, i + kHalf)]);
    } else {
      const int both = codes[code_place(kFormat, r, i)];
      q[0] = (both & 15) - 8;
      q[1] = (both >> 4) - 8;
    }
    w[0] = static_cast<float>(q[0]) * scale;
    w[1] = static_cast<float>(q[1]) * scale;
  }
}

/// The tiles of the row of tiles that holds row n.
template <BlockFormat kFormat>
__device__ __forceinline__ const std::byte* tiles_of(const std::byte* tiles, std::int64_t n, std::int64_t K) {
  return tiles + n / kBlockTileRows * (K / kBlockTerms) * block_tile_bytes(kFormat);
}

template <BlockFormat kFormat, class T>
__global__ void __launch_bounds__(kThreads) unpack_kernel(const std::byte* tiles, std::int64_t first, std::int64_t rows,
                                                          std::int64_t K, T* out, std::int64_t ldo, Levels levels) {
  const int r = threadIdx.x / kHalf, i = threadIdx.x % kHalf;
  const std::int64_t n = (first / kBlockTileRows + blockIdx.x) * kBlockTileRows + r, begin = blockIdx.y * kBlocksEach;
  if (n < first || n >= first + rows) return;
  const std::byte* const row = tiles_of<kFormat>(tiles, n, K);
  for (std::int64_t b = begin; b < begin + kBlocksEach && b < K / kBlockTerms; ++b) {
    float w[2];
    two_weights<kFormat>(row + b * block_tile_bytes(kFormat), r, i, levels, w);
    T* const to = out + (n - first) * ldo + b * kBlockTerms + i;
    to[0] = static_cast<T>(w[0]);
    to[kHalf] = static_cast<T>(w[1]);
  }
}

template <BlockFormat kFormat, class T>
__global__ void __launch_bounds__(kThreads)
    embedding_kernel(const std::byte* tiles, const std::int64_t* ids, float* h, std::int64_t D, Levels levels) {
  const std::int64_t n = ids[blockIdx.x];
  const std::byte* const row = tiles_of<kFormat>(tiles, n, D);
  for (std::int64_t pair = threadIdx.x; pair < D / 2; pair += kThreads) {
    const std::int64_t b = pair / kHalf;
    const int i = static_cast<int>(pair % kHalf);
    float w[2];
    two_weights<kFormat>(row + b * block_tile_bytes(kFormat), static_cast<int>(n % kBlockTileRows), i, levels, w);
    float* const to = h + blockIdx.x * D + b * kBlockTerms + i;
    to[0] = static_cast<float>(static_cast<T>(w[0]));
    to[kHalf] = static_cast<float>(static_cast<T>(w[1]));
  }
}

/// Calls f with the format as a constant.
template <class F>
void with_format(BlockFormat format, const F& f) {
  if (format == BlockFormat::q8_0) f(std::integral_constant<BlockFormat, BlockFormat::q8_0>());
  else if (format == BlockFormat::q4_0) f(std::integral_constant<BlockFormat, BlockFormat::q4_0>());
  else f(std::integral_constant<BlockFormat, BlockFormat::nf4>());
}

}  // namespace

template <class T>
cudaError_t unpack_blocks_launch(BlockFormat any, const std::byte* tiles, std::int64_t first, std::int64_t rows,
                                 std::int64_t K, T* out, std::int64_t ldo, cudaStream_t stream) {
  if (rows == 0 || K == 0) return cudaSuccess;
  const std::int64_t blocks = K / kBlockTerms,
                     tile_rows = (first + rows + kBlockTileRows - 1) / kBlockTileRows - first / kBlockTileRows;
  const dim3 grid(static_cast<unsigned>(tile_rows), static_cast<unsigned>((blocks + kBlocksEach - 1) / kBlocksEach));
  with_format(any, [&](auto format) {
    constexpr BlockFormat kFormat = decltype(format)::value;
    unpack_kernel<kFormat, T><<<grid, kThreads, 0, stream>>>(tiles, first, rows, K, out, ldo, Levels());
  });
  return cudaGetLastError();
}

template <class T>
cudaError_t embedding_blocks_launch(BlockFormat any, const std::byte* tiles, const std::int64_t* ids, float* h,
                                    std::int64_t tokens, std::int64_t D, cudaStream_t stream) {
  if (tokens == 0 || D == 0) return cudaSuccess;
  with_format(any, [&](auto format) {
    constexpr BlockFormat kFormat = decltype(format)::value;
    embedding_kernel<kFormat, T><<<static_cast<unsigned>(tokens), kThreads, 0, stream>>>(tiles, ids, h, D, Levels());
  });
  return cudaGetLastError();
}

template cudaError_t unpack_blocks_launch(BlockFormat, const std::byte*, std::int64_t, std::int64_t, std::int64_t,
                                          float*, std::int64_t, cudaStream_t);
template cudaError_t unpack_blocks_launch(BlockFormat, const std::byte*, std::int64_t, std::int64_t, std::int64_t,
                                          bfloat16*, std::int64_t, cudaStream_t);
template cudaError_t embedding_blocks_launch<float>(BlockFormat, const std::byte*, const std::int64_t*, float*,
                                                    std::int64_t, std::int64_t, cudaStream_t);
template cudaError_t embedding_blocks_launch<bfloat16>(BlockFormat, const std::byte*, const std::int64_t*, float*,
                                                       std::int64_t, std::int64_t, cudaStream_t);

}  // namespace nemo_rl::kernels
