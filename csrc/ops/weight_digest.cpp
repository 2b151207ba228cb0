#include "ops/weight_digest.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstring>

#include "kernels/weight_digest.h"

namespace nemo_rl::ops {

runtime::CudaSlot<std::vector<std::uint64_t>(const at::Tensor&)> weight_digest_cuda("weight_digest");

namespace {

using kernels::kDigestBlock;

std::uint64_t block_digest(const char* bytes, std::int64_t size) {
  std::uint64_t chains[kernels::kDigestChains];
  for (int k = 0; k < kernels::kDigestChains; ++k) chains[k] = kernels::kDigestStart + static_cast<std::uint64_t>(k);
  std::int64_t i = 0;
  for (; i + 32 <= size; i += 32)
    for (int k = 0; k < kernels::kDigestChains; ++k) {
      std::uint64_t word;
      std::memcpy(&word, bytes + i + 8 * k, 8);
      chains[k] = kernels::digest_add(chains[k], word);
    }
  for (; i < size; ++i) chains[0] = kernels::digest_add_byte(chains[0], static_cast<unsigned char>(bytes[i]));
  std::uint64_t hash = kernels::kDigestStart;
  for (auto chain : chains) hash = kernels::digest_add(hash, chain);
  return hash;
}

std::vector<std::uint64_t> block_digests(const at::Tensor& weights) {
  const auto* bytes = static_cast<const char*>(weights.const_data_ptr());
  const auto n = static_cast<std::int64_t>(weights.nbytes()), blocks = (n + kDigestBlock - 1) / kDigestBlock;
  std::vector<std::uint64_t> parts(static_cast<std::size_t>(blocks));
  at::parallel_for(0, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b)
      parts[static_cast<std::size_t>(b)] =
          block_digest(bytes + b * kDigestBlock, std::min(kDigestBlock, n - b * kDigestBlock));
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
