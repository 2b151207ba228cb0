// Sums and extrema over a thread block in a fixed order: lanes of a warp by a tree of shuffles, then warps in order.
// The result depends on the block size alone, so the same launch gives the same bits every time.
#pragma once
#include <cstdint>

#include "kernels/matrix_view.h"

namespace nemo_rl::kernels {

constexpr int kWarp = 32;
constexpr int kMaxWarps = 32;

__device__ __forceinline__ double warp_reduce(RowMerge how, double v) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    v = merge_rows(how, v, __shfl_down_sync(0xffffffffu, v, offset));
  return v;
}

/// The merged value in every thread. `shared` holds kMaxWarps doubles and may be reused after the call.
__device__ __forceinline__ double block_reduce(RowMerge how, double v, double* shared) {
  v = warp_reduce(how, v);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = (blockDim.x + kWarp - 1) / kWarp;
  if (lane == 0) shared[warp] = v;
  __syncthreads();
  double total = shared[0];
  for (int w = 1; w < warps; ++w) total = merge_rows(how, total, shared[w]);
  __syncthreads();  // before the next call writes to `shared`
  return total;
}

}  // namespace nemo_rl::kernels
