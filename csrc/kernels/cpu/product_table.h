// The ways of a forward product: from how many rows of x to how many each is taken, and in which order it adds up. All
// of a type have one order, or this does not compile. The switch points are kernels/product_figures.h's; a way that a
// capability lacks has no rows.
//
//   way       rows of x           what lies in the lanes, and what is packed
//   few       1 to 8              rows of w, turned in registers; x as rows of words
//   panels    9 and more          rows of x, packed as panels; w is read where it lies, on AVX2 widened strip by strip
//   wide      hundreds            both packed, sums by register_tile (AVX-512)
//   packed    1 to 3, 12 or 64    w from its copy of 12 bits a weight, where the engine has made one (AVX2, AVX-512)
//
// Where tiles multiply bfloat16 (kernels/tiles/), they take all rows: up to 127 with rows of w as the first operand
// (tile_products.h), from 128 on with rows of x (wide_tiles.h). Both are SumOrder::tiles, by the one instruction. Up to
// 4 rows take w from its copy of 12 bits, too: vectors add up there in the order of the tiles (packed_tiles.cpp).
#pragma once
#include "kernels/cpu/linear_wide.h"
#include "kernels/cpu/packed_strip.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

struct ProductWay {
  SumOrder order;
  std::int64_t from, to;  ///< rows of x; none if from > to
  constexpr bool is_taken() const { return from <= to; }
};

template <class T>
struct ProductTable {
  static constexpr SumOrder kOrder = Terms<T>::kOrder;

  static constexpr bool kWidens = sizeof(T) < sizeof(float) && Terms<T>::kPerWord == 1;
  static constexpr std::int64_t wide_from(std::int64_t words) {
    return kHasWide<T> ? linear_wide_chunks(kWidens, words) * kLinearWideRows : INT64_MAX;
  }

  static constexpr ProductWay few{kOrder, 1, kLinearFewRows};
  static constexpr ProductWay panels{kWidensStrips<T> ? Terms<float>::kOrder : kOrder, kLinearFewRows + 1,
                                     wide_from(0)};
  static constexpr ProductWay wide{kOrder, wide_from(INT64_MAX), kHasWide<T> ? INT64_MAX : 0};  // of the longest rows
  static constexpr ProductWay packed{Terms<bfloat16>::kOrder, 1, sizeof(T) == 2 ? PackedChains::kMost : 0};

  static constexpr bool has_one_order() {
    for (const ProductWay& way : {few, panels, wide, packed})
      if (way.is_taken() && way.order != kOrder) return false;
    return true;
  }
  static_assert(has_one_order(), "a row would have other bits among other rows");
};

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
