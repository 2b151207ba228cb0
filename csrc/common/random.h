// Counter-based random numbers: a draw is a pure function of its key, so no generator state has to be saved, and
// the value never depends on what else runs, in which order, or on how many threads.
#pragma once
#include <array>
#include <cstdint>

#include "common/host_device.h"

namespace nemo_rl {

/// Who draws. Part of the key, so that validation never changes what training samples.
enum class RandomStream : std::uint32_t { train = 0, val = 1, eval = 2, shuffle = 3, pack = 4, init = 5 };

/// Philox-4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
NRL_HOST_DEVICE inline std::array<std::uint32_t, 4> philox4x32(std::array<std::uint32_t, 4> counter,
                                                               std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{0xD2511F53u} * counter[0];
    const std::uint64_t p1 = std::uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<std::uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(p1),
               static_cast<std::uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(p0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

/// The key of one draw: (seed, stream) is the Philox key, the rest its counter.
struct RandomKey {
  std::uint32_t seed = 0;
  RandomStream stream = RandomStream::train;
  std::uint64_t draw_id = 0;   ///< counts prompts over the whole run
  std::uint32_t sample = 0;    ///< which of the G generations of that prompt
  std::uint32_t position = 0;  ///< absolute token position
};

NRL_HOST_DEVICE inline std::array<std::uint32_t, 4> random_bits(const RandomKey& k) {
  return philox4x32(
      {static_cast<std::uint32_t>(k.draw_id), static_cast<std::uint32_t>(k.draw_id >> 32), k.sample, k.position},
      {k.seed, static_cast<std::uint32_t>(k.stream)});
}

/// Uniform in [0, 1) with 53 random bits.
NRL_HOST_DEVICE inline double random_uniform(const RandomKey& k) {
  const auto bits = random_bits(k);
  const std::uint64_t wide = (std::uint64_t{bits[0]} << 32) | bits[1];
  return static_cast<double>(wide >> 11) * 0x1.0p-53;
}

}  // namespace nemo_rl
