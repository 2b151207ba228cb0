// Digest of a weight buffer: FNV-1a over its 8-byte words in four chains a block, then over the blocks in order. Equal
// weights have equal digests on every device.
#pragma once
#include <cstdint>
#include <cstring>

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

/// The digest of one block of `size` bytes, on the CPU. With `to` they are copied there on the way, which costs nothing
/// more than reading them.
inline std::uint64_t digest_bytes(const char* bytes, std::int64_t size, char* to) {
  std::uint64_t chains[kDigestChains];
  for (int k = 0; k < kDigestChains; ++k) chains[k] = kDigestStart + static_cast<std::uint64_t>(k);
  std::int64_t i = 0;
  for (; i + 32 <= size; i += 32) {
    std::uint64_t words[kDigestChains];
    std::memcpy(words, bytes + i, sizeof words);
    if (to != nullptr) std::memcpy(to + i, words, sizeof words);
    for (int k = 0; k < kDigestChains; ++k) chains[k] = digest_add(chains[k], words[k]);
  }
  if (to != nullptr) std::memcpy(to + i, bytes + i, static_cast<std::size_t>(size - i));
  for (; i < size; ++i) chains[0] = digest_add_byte(chains[0], static_cast<unsigned char>(bytes[i]));
  std::uint64_t hash = kDigestStart;
  for (auto chain : chains) hash = digest_add(hash, chain);
  return hash;
}

}  // namespace nemo_rl::kernels
