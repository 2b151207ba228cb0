// Products of few rows of x with weights in blocks that are unpacked in registers, with rows of w in the lanes, as in
// few_rows_tile: a tile gives pairs of terms (block_pairs.h) or terms (block_terms.h). Unpacked rows would have to be
// stored, and turned when they are read again.
#pragma once
#include "kernels/cpu/block_pairs.h"
#include "kernels/cpu/block_strips.h"
#include "kernels/cpu/block_terms.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX512BF16__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool kBlockPanels = Terms<bfloat16>::kPerWord == 1;  ///< more rows of x than few share unpacked weights
constexpr std::int64_t kMostBlockRows = kBlockPanels ? kBlockPanelRows : kLinearFewRows;  ///< of x
constexpr int kBlockGroup = static_cast<int>(kBlockTileRows);                             ///< rows of w
constexpr int kBlockGroups = static_cast<int>(kLinearTileN) / kBlockGroup;

#if defined(__AVX512BF16__)
/// The sums of 16 rows of w with a row of packed x: from unpacked weights.
template <BlockFormat kFormat>
[[gnu::noinline]] void unpacked_sums(const std::byte* tile, std::int64_t K, const Terms<bfloat16>::Word* x,
                                     float* sums) {
  using X = Terms<bfloat16>;
  constexpr int kRows = X::V::kLanes, kParts = kBlockGroup / kRows;
  bfloat16 terms[kBlockGroup][kBlockTerms];
  const bfloat16* at[kBlockGroup];
  for (int i = 0; i < kBlockGroup; ++i) at[i] = terms[i];
  X::V sum[kParts];
  for (auto& part : sum) part = X::V{};
  for (std::int64_t block = 0; block < K / kBlockTerms; ++block, tile += block_tile_bytes(kFormat)) {
    unpack_tile<kFormat>(tile, terms[0], kBlockTerms);
    for (std::int64_t k = 0; k < kBlockTerms; k += X::kPerWord, ++x)
      for (int i = 0; i < kParts; ++i)
        sum[i] = X::multiply_add(gathered<bfloat16>(at + i * kRows, k, kBlockTerms), X::V(*x), sum[i]);
  }
  for (int i = 0; i < kParts; ++i) store(sums + i * kRows, sum[i]);
}

/// Whether one of 16 sums is zero or not finite.
bool any_zero_or_not_finite(const float* sums) {
  bool any = false;
  for (int i = 0; i < kBlockGroup; ++i) any |= sums[i] == 0 || !(__builtin_fabsf(sums[i]) < __builtin_inff());
  return any;
}
#endif

/// sums[r][width] of a strip's 48 rows of w. kRows 0: of more rows of x than few.
template <BlockFormat kFormat, int kRows>
void multiply_strip(const LinearInput<bfloat16>& p, const BlockStrip& strip, float* sums, std::int64_t width) {
  constexpr int kAtOnce =
      kRows == 1 || kRows == 2 ? kBlockGroups : 1;  // chains enough that none waits for its last sum
  const std::int64_t row_bytes = block_row_bytes(kFormat, p.K);
  const std::byte* rows[kBlockGroups];
  for (int g = 0; g < kBlockGroups; ++g) rows[g] = strip.rows(g, row_bytes);
  for (int g = 0; g < kBlockGroups; g += kAtOnce) {
    float* const out = sums + g * kBlockGroup;
    if constexpr (kRows > 0) multiply_groups<kFormat, kRows, kAtOnce>(p, rows + g, strip.ahead, out, width);
    else multiply_panels<kFormat>(p, rows[g], strip.ahead, out, width);
  }
#if defined(__AVX512BF16__)  // a zero may lack its sign there
  const auto* const x = static_cast<const Terms<bfloat16>::Word*>(p.packed);
  for (std::int64_t r = 0; r < p.M; ++r)
    for (int g = 0; g < kBlockGroups; ++g) {
      float* const at = sums + r * width + g * kBlockGroup;
      if (any_zero_or_not_finite(at)) unpacked_sums<kFormat>(rows[g], p.K, x + r * packed_row_words<bfloat16>(p.K), at);
    }
#endif
}

/// Computes tiles of kStrips strips (kernels/cpu/block_strips.h).
template <int kStrips, class StripOf, class StoreOf>
void run_block_strips(const LinearInput<bfloat16>& p, BlockFormat format, std::int64_t begin, std::int64_t end,
                      const StripOf& strip_of, const StoreOf& store_of) {
  constexpr std::int64_t kWidth = kStrips * kLinearTileN;
  alignas(64) float sums[kMostBlockRows * kWidth];
  const auto run = [&](auto rows) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (int i = 0; i < kStrips; ++i)
        with_format(format,
                    [&](auto f) { multiply_strip<f(), rows()>(p, strip_of(t, i), sums + i * kLinearTileN, kWidth); });
      const auto store = store_of(t);
      for (std::int64_t m = 0; m < p.M; ++m) store(m, sums + m * kWidth);
    }
  };
  if constexpr (kBlockPanels)
    if (p.M > kLinearFewRows) return run(std::integral_constant<int, 0>());
  with_constant<kLinearFewRows>(static_cast<int>(p.M), run);
}
#else
constexpr std::int64_t kMostBlockRows = 0;
/// Never called: block_product_rows says so.
template <int kStrips, class StripOf, class StoreOf>
void run_block_strips(const LinearInput<bfloat16>&, BlockFormat, std::int64_t, std::int64_t, const StripOf&,
                      const StoreOf&) {}
#endif

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
