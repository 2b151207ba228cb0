// One number that tells whether two weight buffers hold the same bytes.
#pragma once
#include <cstdint>
#include <vector>

#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

/// Digest of a contiguous buffer's bytes (kernels/weight_digest.h), the same on every device.
std::uint64_t weight_digest(const at::Tensor& weights);

/// The digests of its blocks.
extern runtime::CudaSlot<std::vector<std::uint64_t>(const at::Tensor& weights)> weight_digest_cuda;

}  // namespace nemo_rl::ops
