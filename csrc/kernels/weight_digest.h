// Digest of a weight buffer: FNV-1a over its 8-byte words in four chains a block, then over the blocks in order. Equal
// weights have equal digests on every device.
#pragma once
#include <cstdint>

#include "common/host_device.h"

namespace nemo_rl::kernels {

inline constexpr std::int64_t kDigestBlock = 1 << 20;  ///< bytes
inline constexpr int kDigestChains = 4;                ///< as fast as memory on the CPU
inline constexpr std::uint64_t kDigestStart = 14695981039346656037ull;

/// The chain's value after one more word.
NRL_INLINE std::uint64_t digest_add(std::uint64_t chain, std::uint64_t word) {
  chain = (chain ^ word) * 1099511628211ull;
  return chain ^ chain >> 29;  // multiplication only carries upwards
}
/// A single byte at the end of the last block, without the mixing.
NRL_INLINE std::uint64_t digest_add_byte(std::uint64_t chain, unsigned char byte) {
  return (chain ^ byte) * 1099511628211ull;
}

}  // namespace nemo_rl::kernels
