#include "ops/weight_digest.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels/weight_digest.h"

namespace nemo_rl::ops {

runtime::CudaSlot<std::vector<std::uint64_t>(const at::Tensor&)> weight_digest_cuda("weight_digest");

namespace {

using kernels::kDigestBlock;

std::vector<std::uint64_t> block_digests(const at::Tensor& weights) {
  const auto* bytes = static_cast<const char*>(weights.const_data_ptr());
  const auto n = static_cast<std::int64_t>(weights.nbytes()), blocks = (n + kDigestBlock - 1) / kDigestBlock;
  std::vector<std::uint64_t> parts(static_cast<std::size_t>(blocks));
  at::parallel_for(0, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b)
      parts[static_cast<std::size_t>(b)] =
          kernels::digest_bytes(bytes + b * kDigestBlock, std::min(kDigestBlock, n - b * kDigestBlock), nullptr);
  });
  return parts;
}

}  // namespace

std::uint64_t weight_digest(const at::Tensor& weights) {
  NRL_CHECK(weights.is_contiguous(), "weight_digest: a contiguous buffer was expected");
  std::uint64_t hash = kernels::kDigestStart;
  for (auto part : weights.is_cuda() ? weight_digest_cuda.get(weights)(weights) : block_digests(weights))
    hash = kernels::digest_add(hash, part);
  return hash;
}

}  // namespace nemo_rl::ops
