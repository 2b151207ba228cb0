// Where the sums of a backward product go, block of terms after block of terms.
#pragma once
#include "kernels/cpu/plain.h"
#include "kernels/gemm.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// What becomes of a block's sums for some rows and columns.
template <class T, class O>
struct BlockSums {
  using A = accumulate_t<T>;
  static constexpr bool kDirect = sizeof(A) == sizeof(O);  // c itself holds the sums of the blocks so far
  O* c;
  std::int64_t ldc;
  A* sums;  ///< holds them otherwise
  std::int64_t lds;
  bool first, last, accumulate;
  bool adds() const { return !first || accumulate; }

  /// Row i takes the sums of `cols` columns.
  [[gnu::always_inline]] void store(int i, const A* values, int cols) const {
    O* const out = c + i * ldc;
    if constexpr (kDirect) {
      for (int j = 0; j < cols; ++j) out[j] = adds() ? out[j] + values[j] : values[j];
    } else {
      A* const before = sums + i * lds;
      for (int j = 0; j < cols; ++j) {
        const A sum = first ? values[j] : before[j] + values[j];
        if (last) {
          out[j] = static_cast<O>(accumulate ? static_cast<A>(out[j]) + sum : sum);
        } else {
          before[j] = sum;
        }
      }
    }
  }
};

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
