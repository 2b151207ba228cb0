// Float sums and maxima over a group of threads (a warp, or a whole block of warps) in a fixed order: every thread gets
// the result.
#pragma once
#include "kernels/cuda/block_reduce.cuh"

namespace nemo_rl::kernels {

struct AddOp {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
/// NaN loses against a number.
struct MaxOp {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b > a ? b : a;
  }
};
struct MinOp {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

/// Lanes i and i ^ offset for offset 16, 8, ... 1: the same tree in every lane.
template <class Op, class T>
__device__ __forceinline__ T warp_all(T v, Op op) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) v = op(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

/// Over a block of Threads threads, or where Threads is one warp over the calling warp. `shared` holds Threads / 32
/// values and may be used again after the call.
template <int Threads, class Op, class T>
__device__ __forceinline__ T group_all(T v, Op op, T* shared) {
  v = warp_all(v, op);
  if constexpr (Threads > kWarp) {
    if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = v;
    __syncthreads();
    v = shared[0];
#pragma unroll
    for (int w = 1; w < Threads / kWarp; ++w) v = op(v, shared[w]);
    __syncthreads();  // before the next call writes to `shared`
  }
  return v;
}

}  // namespace nemo_rl::kernels
