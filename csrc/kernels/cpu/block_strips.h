// How the products of few rows of x with weights in blocks are cut: strips of 48 rows of w, which lie as ggml lays
// them.
#pragma once
#include "kernels/cpu/linear_store.h"
#include "kernels/weight_blocks.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// Rows of w of a strip, of which `have` exist.
struct BlockStrip {
  const std::byte* rows;
  std::int64_t have;
  bool asks_ahead;  ///< the strip after it is read next
};

/// run(input, format, begin, end, strip_of, store_of) computes tiles [begin, end): strip_of(tile, i) gives their rows
/// of w, store_of(tile) takes the sums.
template <class O, class Run>
void forward_blocks(const LinearForwardArgs<bfloat16, O>& p, const WeightBlocks& w, std::int64_t begin,
                    std::int64_t end, bool more, const Run& run) {
  const std::int64_t row_bytes = block_row_bytes(w.format, p.input.K);
  run(
      p.input, w.format, begin, end,
      [&](std::int64_t t, int) {
        const std::int64_t n = t * kLinearTileN;
        return BlockStrip{w.at + n * row_bytes, smaller(kLinearTileN, p.N - n), more || t + 1 < end};
      },
      [&](std::int64_t t) { return store_strip(p, t); });
}

/// The same with two strips for each tile: gates and their ups.
template <class Run>
void swiglu_blocks(const LinearSwigluArgs<bfloat16>& p, const WeightBlocks& w, std::int64_t begin, std::int64_t end,
                   bool more, const Run& run) {
  static_assert(kHalf == kLinearTileN);
  const std::int64_t row_bytes = block_row_bytes(w.format, p.input.K);
  run(
      p.input, w.format, begin, end,
      [&](std::int64_t t, int i) {
        const std::int64_t n = t * kHalf;
        return BlockStrip{w.at + (i * p.I + n) * row_bytes, smaller<std::int64_t>(kHalf, p.I - n), more || t + 1 < end};
      },
      [&](std::int64_t t) { return store_strip(p, t); });
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
