// In which order a forward product adds up the terms of one output. A process keeps to one order for a type, because
// generation and training must have the same bits; kernels/cpu/product_table.h checks that when it is compiled.
#pragma once

namespace nemo_rl::kernels {

enum class SumOrder {
  terms,  ///< one chain of fused multiply-adds over the terms, in ascending order
  pairs,  ///< one chain over pairs of terms, as VDPBF16PS adds them
  tiles,  ///< steps of 32 terms, each an even and an odd chain, as TDPBF16PS adds them (kernels/tiles/software_tiles.h)
};

}  // namespace nemo_rl::kernels
