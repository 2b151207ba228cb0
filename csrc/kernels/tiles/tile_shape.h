// The shape of a tile: 16 rows of 64 bytes. As an operand a row holds 32 bfloat16, in pairs; as a result, 16 float32.
#pragma once
#include <cstdint>

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

inline constexpr int kTileRows = 16, kTilePairs = 16, kTileBytes = 64;
inline constexpr std::int64_t kTileTerms = 32;
inline constexpr int kOperandB = 6;  ///< the first of the tiles that hold an operand B; 0 to 5: sums and operands A

/// Tile steps of a row of K terms; terms beyond K are zero.
constexpr std::int64_t tile_steps(std::int64_t K) { return (K + kTileTerms - 1) / kTileTerms; }

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
