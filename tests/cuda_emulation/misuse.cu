// Kernels that do what CUDA leaves undefined: the emulator has to say so.
#include <cuda_runtime_api.h>

#include "kernels/cuda/tensor_core.cuh"

namespace {

constexpr unsigned kAll = 0xffffffffu;
enum Misuse {
  kNone,
  kDivergentShuffle,
  kPartialMask,
  kLaneOutside,
  kBitsOutside,
  kTwoBarriers,
  kEndedLane,
  kUnalignedRow,
  kRowElsewhere,
  kPartOfAWarp
};

__global__ void misuse_kernel(Misuse what, float* out) {
  extern __shared__ __align__(16) uint4 shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float value = static_cast<float>(lane);
  if (what == kDivergentShuffle && lane == 0) value = __shfl_xor_sync(kAll, value, 1);
  if (what == kPartialMask) value = __shfl_xor_sync(0xffffu, value, 1);
  if (what == kLaneOutside) value = __shfl_sync(kAll, value, 40);
  if (what == kBitsOutside) value = __shfl_xor_sync(kAll, value, 32);
  if (what == kTwoBarriers && warp == 0) __syncthreads();
  if (what == kEndedLane && lane == 3) return;
  if (what == kEndedLane) value = __shfl_sync(kAll, value, 3);
  using nemo_rl::bfloat16;
  std::uint32_t words[4] = {};
  float sums[4] = {};
  bfloat16* const rows = reinterpret_cast<bfloat16*>(shared);
  if (what == kUnalignedRow) nemo_rl::kernels::load_matrices(rows + lane * 12, words);
  if (what == kRowElsewhere) nemo_rl::kernels::load_matrices(reinterpret_cast<bfloat16*>(out), words);
  if (what == kPartOfAWarp && lane == 3) return;
  if (what == kPartOfAWarp) nemo_rl::kernels::multiply_add(sums, words, 0, 0);
  __syncthreads();
  out[threadIdx.x] = value;
}

/// out[i] = in[i] by way of shared memory; `waits`: for the copy of the last group, too.
__global__ void copied_kernel(const float* in, bool waits, float* out) {
  extern __shared__ __align__(16) uint4 shared[];
  float* const held = reinterpret_cast<float*>(shared);
  nemo_rl::kernels::copy_async<4>(held + threadIdx.x, in + threadIdx.x, true);
  nemo_rl::kernels::commit_copies();
  if (waits) nemo_rl::kernels::wait_for_copies<0>();
  else nemo_rl::kernels::wait_for_copies<1>();
  __syncthreads();
  out[threadIdx.x] = held[threadIdx.x];
}

}  // namespace

extern "C" std::int64_t misuse(std::int64_t what, float* out) {
  misuse_kernel<<<1, 64, 0, nullptr>>>(static_cast<Misuse>(what), out);
  return cudaGetLastError();
}

extern "C" std::int64_t copied(const float* in, std::int64_t waits, float* out) {
  copied_kernel<<<1, 64, 256, nullptr>>>(in, waits != 0, out);
  return cudaGetLastError();
}
