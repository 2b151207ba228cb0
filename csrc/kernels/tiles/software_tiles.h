// AMX's tiles in software, with the bits of the hardware. The rules of TDPBF16PS for c[i][j] and the 32 terms of a
// step:
//   even = 0; even = fma(a[i][2p], b[p][2j], even) for p = 0..15; odd likewise over the other terms; c = c + (even +
//   odd)
// in float32, rounded to nearest even. Denormal operands count as zero, and denormal results become zero.
#pragma once
#include "common/bfloat16.h"
#include "kernels/sum_order.h"
#include "kernels/tiles/tile_shape.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

class SoftwareTiles {
 public:
  static constexpr SumOrder kOrder = SumOrder::tiles;

  /// As AmxTiles: of so many rows in sums and operands A.
  explicit SoftwareTiles(int rows = kTileRows) : rows_(rows) {}
  int rows() const { return rows_; }

  template <int kTile>
  void zero() {
    for (auto& row : tile_[kTile])
      for (auto& word : row) word = 0;
  }
  /// Rows of 64 bytes, `stride` bytes apart.
  template <int kTile>
  void load(const void* from, std::int64_t stride) {
    for (int i = 0; i < rows_of(kTile); ++i)
      __builtin_memcpy(tile_[kTile][i], static_cast<const char*>(from) + i * stride, kTileBytes);
  }
  template <int kTile>
  void store(void* to, std::int64_t stride) const {
    for (int i = 0; i < rows_of(kTile); ++i)
      __builtin_memcpy(static_cast<char*>(to) + i * stride, tile_[kTile][i], kTileBytes);
  }
  /// c += a · b, for one step of terms.
  template <int kC, int kA, int kB>
  void multiply() {
    float low[kTilePairs][kTilePairs], high[kTilePairs][kTilePairs];  // of b
    for (int p = 0; p < kTilePairs; ++p)
      for (int j = 0; j < kTilePairs; ++j) {
        low[p][j] = operand(tile_[kB][p][j] << 16);
        high[p][j] = operand(tile_[kB][p][j] & 0xffff0000u);
      }
    for (int i = 0; i < rows_; ++i) {
      float even[kTilePairs] = {}, odd[kTilePairs] = {};
      for (int p = 0; p < kTilePairs; ++p) {
        const float first = operand(tile_[kA][i][p] << 16), second = operand(tile_[kA][i][p] & 0xffff0000u);
        for (int j = 0; j < kTilePairs; ++j) {
          even[j] = flushed(__builtin_fmaf(first, low[p][j], even[j]));
          odd[j] = flushed(__builtin_fmaf(second, high[p][j], odd[j]));
        }
      }
      for (int j = 0; j < kTilePairs; ++j) {
        const float sum = flushed(operand(tile_[kC][i][j]) + flushed(even[j] + odd[j]));
        tile_[kC][i][j] = __builtin_bit_cast(std::uint32_t, sum);
      }
    }
  }

 private:
  int rows_of(int tile) const { return tile < kOperandB ? rows_ : kTileRows; }
  /// A denormal becomes a zero of its sign.
  static float flushed(float x) {
    const auto bits = __builtin_bit_cast(std::uint32_t, x);
    return __builtin_bit_cast(float, bits&((bits & 0x7f800000u) == 0 ? 0x80000000u : 0xffffffffu));
  }
  static float operand(std::uint32_t bits) { return flushed(__builtin_bit_cast(float, bits)); }

  int rows_;
  alignas(64) std::uint32_t tile_[8][kTileRows][kTilePairs];
};

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
