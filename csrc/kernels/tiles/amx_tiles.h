// The processor's own tiles (Intel AMX). The system must have granted them (common/cpu_capability.cpp). The assembler
// knows the instructions, the compiler need not.
#pragma once
#include "kernels/sum_order.h"
#include "kernels/tiles/tile_shape.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// All eight tiles of this thread, configured as long as it lives; then released, for other libraries and for a thread
/// switch that has less to save. Sums and operands A (tiles 0 to 5) have `rows` rows, and no more of them are read or
/// written.
class AmxTiles {
 public:
  static constexpr SumOrder kOrder = SumOrder::tiles;

  explicit AmxTiles(int rows = kTileRows) : rows_(rows) {
    Configuration whole;
    for (int t = 0; t < 8; ++t)
      whole.bytes_of_row[t] = kTileBytes, whole.rows[t] = static_cast<std::uint8_t>(t < kOperandB ? rows : kTileRows);
    asm volatile("ldtilecfg %0" : : "m"(whole));
  }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
  ~AmxTiles() { asm volatile("tilerelease"); }
  int rows() const { return rows_; }

  template <int kTile>
  [[gnu::always_inline]] void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  template <int kTile>
  [[gnu::always_inline]] void load(const void* from, std::int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  [[gnu::always_inline]] void store(void* to, std::int64_t stride) const {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kC, int kA, int kB>
  [[gnu::always_inline]] void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }

 private:
  struct alignas(64) Configuration {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes_of_row[16] = {};
    std::uint8_t rows[16] = {};
  };
  static_assert(sizeof(Configuration) == 64);
  int rows_;
};

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
