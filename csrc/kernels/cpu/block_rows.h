// Products of few rows of x with weights in blocks that are unpacked in registers, with rows of w in the lanes, as in
// few_rows_tile: a tile gives pairs of terms (block_pairs.h), terms (block_terms.h) or codes (block_codes.h, for any
// number of rows). Unpacked rows would have to be stored, and turned when they are read again.
#pragma once
#include "kernels/cpu/block_pairs.h"
#include "kernels/cpu/block_strips.h"
#include "kernels/cpu/block_terms.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX512BF16__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool kBlockPanels = Terms<bfloat16>::kPerWord == 1;  ///< more rows of x than few share codes
/// Rows of x.
constexpr std::int64_t most_block_rows(BlockFormat format) {  // look-ups of nf4 pay for few rows only
  return kBlockPanels && format != BlockFormat::nf4 ? INT64_MAX : kLinearFewRows;
}
constexpr int kBlockGroup = static_cast<int>(kBlockTileRows);  ///< rows of w
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

/// sums[r][width] of a strip's 48 rows of w and rows [m, m + count) of x; with kRows > 0, which are all, kRows of them.
template <BlockFormat kFormat, int kRows>
void multiply_strip(const LinearInput<bfloat16>& p, [[maybe_unused]] std::int64_t m,
                    [[maybe_unused]] std::int64_t count, const BlockStrip& strip, float* sums, std::int64_t width) {
  constexpr int kAtOnce = kGroupsAtOnce<kFormat, kRows>;
  const std::int64_t row_bytes = block_row_bytes(kFormat, p.K);
  const std::byte* rows[kBlockGroups];
  for (int g = 0; g < kBlockGroups; ++g) rows[g] = strip.rows(g, row_bytes);
  for (int g = 0; g < kBlockGroups; g += kAtOnce) {
    float* const out = sums + g * kBlockGroup;
    if constexpr (kRows > 0) multiply_groups<kFormat, kRows, kAtOnce>(p, rows + g, strip.ahead, out, width);
    else if constexpr (kFormat != BlockFormat::nf4)
      multiply_panels<kFormat>(p, m, count, rows[g], strip.ahead, out, width);
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
void run_block_strips(const LinearInput<bfloat16>& p, BlockFormat format, const LinearTiles& tiles, std::int64_t begin,
                      std::int64_t end, const StripOf& strip_of, const StoreOf& store_of) {
  constexpr std::int64_t kWidth = kStrips * kLinearTileN;
  alignas(64) float sums[(kBlockPanels ? kLinearTileM : kLinearFewRows) * kWidth];
  const auto run = [&](auto rows) {
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t m = tiles.row(t), count = smaller(kLinearTileM, p.M - m);
      for (int i = 0; i < kStrips; ++i)
        with_format(format, [&](auto f) {
          multiply_strip<f(), rows()>(p, m, count, strip_of(t, i), sums + i * kLinearTileN, kWidth);
        });
      const auto store = store_of(t);
      for (std::int64_t r = 0; r < count; ++r) store(m + r, sums + r * kWidth);
    }
  };
  if constexpr (kBlockPanels)
    if (p.M > kLinearFewRows) return run(std::integral_constant<int, 0>());
  with_constant<kLinearFewRows>(static_cast<int>(p.M), run);
}
#else
constexpr std::int64_t most_block_rows(BlockFormat) { return 0; }
/// Never called: block_product_rows says so.
template <int kStrips, class StripOf, class StoreOf>
void run_block_strips(const LinearInput<bfloat16>&, BlockFormat, const LinearTiles&, std::int64_t, std::int64_t,
                      const StripOf&, const StoreOf&) {}
#endif

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
