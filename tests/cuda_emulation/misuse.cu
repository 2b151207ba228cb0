// Kernels that do what CUDA leaves undefined: the emulator has to say so.
#include <cuda_runtime_api.h>

namespace {

constexpr unsigned kAll = 0xffffffffu;
enum Misuse { kNone, kDivergentShuffle, kPartialMask, kLaneOutside, kBitsOutside, kTwoBarriers, kEndedLane };

__global__ void misuse_kernel(Misuse what, float* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float value = static_cast<float>(lane);
  if (what == kDivergentShuffle && lane == 0) value = __shfl_xor_sync(kAll, value, 1);
  if (what == kPartialMask) value = __shfl_xor_sync(0xffffu, value, 1);
  if (what == kLaneOutside) value = __shfl_sync(kAll, value, 40);
  if (what == kBitsOutside) value = __shfl_xor_sync(kAll, value, 32);
  if (what == kTwoBarriers && warp == 0) __syncthreads();
  if (what == kEndedLane && lane == 3) return;
  if (what == kEndedLane) value = __shfl_sync(kAll, value, 3);
  __syncthreads();
  out[threadIdx.x] = value;
}

}  // namespace

extern "C" std::int64_t misuse(std::int64_t what, float* out) {
  misuse_kernel<<<1, 64, 0, nullptr>>>(static_cast<Misuse>(what), out);
  return cudaGetLastError();
}
