// Products of up to 32 rows of x with weights in blocks. Some steps of a strip of w are unpacked while tiles multiply
// the steps before them, so the unpacked weights stay in the nearest cache. The tiles and the order of their steps are
// those of tile_products.h.
#include "kernels/cpu/block_strips.h"
#include "kernels/cpu/block_weights.h"
#include "kernels/tiles/tile_products.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

static_assert(kBlockTerms == kTileTerms);

constexpr int kGroups = static_cast<int>(kLinearTileN) / kTileRows, kSteps = 4;  // of 16 rows; of a chunk
constexpr std::int64_t kTileSize = kTileRows * kTileTerms, kChunkSize = kGroups * kSteps * kTileSize;
constexpr std::int64_t kMostRows = 2 * kTileRows;
static_assert(kGroups == 3 && kTileRows == kBlockTileRows);

/// Adds one step: tiles 0 to 2 are sums with the first 16 rows of x, 3 to 5 with the next 16.
template <int kColumns>
[[gnu::always_inline]] inline void multiply_step(Tiles& tiles, const bfloat16* w, const std::uint32_t* x,
                                                 std::int64_t group) {
  constexpr std::int64_t kNext = kSteps * kTileSize;
  const auto load = [&](int g) __attribute__((always_inline)) { tiles.template load<6>(w + g * kNext, kTileBytes); };
  tiles.template load<7>(x, kTileBytes);
  load(0), tiles.template multiply<0, 6, 7>();
  load(1), tiles.template multiply<1, 6, 7>();
  load(2), tiles.template multiply<2, 6, 7>();
  if constexpr (kColumns > 1) {
    tiles.template load<7>(x + group, kTileBytes);
    load(0), tiles.template multiply<3, 6, 7>();
    load(1), tiles.template multiply<4, 6, 7>();
    load(2), tiles.template multiply<5, 6, 7>();
  }
}

/// by_column[48][kMostRows] = the strip's rows times kColumns times 16 rows of packed x.
template <BlockFormat kFormat, int kColumns>
[[gnu::noinline]] void multiply_strip(Tiles& tiles, const BlockStrip& strip, const LinearInput<bfloat16>& p,
                                      float* by_column) {
  constexpr std::int64_t kBytes = block_tile_bytes(kFormat);
  alignas(64) std::byte room[2 * kChunkSize * sizeof(bfloat16)];
  auto* unpacked = reinterpret_cast<bfloat16*>(room);
  bfloat16* multiplied = unpacked + kChunkSize;
  const std::int64_t steps = tile_steps(p.K), row_bytes = block_row_bytes(kFormat, p.K);
  const auto* x = static_cast<const std::uint32_t*>(p.packed);
  tiles.template zero<0>(), tiles.template zero<1>(), tiles.template zero<2>();
  if constexpr (kColumns > 1) tiles.template zero<3>(), tiles.template zero<4>(), tiles.template zero<5>();
  int before = 0;  // steps of the chunk that is multiplied
  for (std::int64_t s = 0; s < steps || before > 0; s += kSteps) {
    const int count = static_cast<int>(clamped(steps - s, 0, kSteps));
    for (int step = 0; step < kSteps; ++step) {
      for (int g = 0; step < count && g < kGroups; ++g) {
        const std::byte* const tile = strip.rows(g, row_bytes) + (s + step) * kBytes;
        ask_for<kFormat>(tile + strip.ahead);
        unpack_tile<kFormat>(tile, unpacked + (g * kSteps + step) * kTileSize, kTileTerms);
      }
      if (step >= before) continue;
      multiply_step<kColumns>(tiles, multiplied + step * kTileSize, x, packed_group_words(p.K));
      x += kTilePairs * kTileRows;
    }
    before = count;
    bfloat16* const next = multiplied;
    multiplied = unpacked, unpacked = next;
  }
  constexpr std::int64_t kGroup = kTileRows * kMostRows, kStride = kMostRows * sizeof(float);
  tiles.template store<0>(by_column, kStride);
  tiles.template store<1>(by_column + kGroup, kStride);
  tiles.template store<2>(by_column + 2 * kGroup, kStride);
  if constexpr (kColumns > 1) {
    tiles.template store<3>(by_column + kTileRows, kStride);
    tiles.template store<4>(by_column + kGroup + kTileRows, kStride);
    tiles.template store<5>(by_column + 2 * kGroup + kTileRows, kStride);
  }
}

/// Computes tiles [begin, end), which are strips of kStrips times 48 columns: strip_of(tile, i) gives their rows of w,
/// store_of(tile) takes the sums.
template <int kStrips, class StripOf, class StoreOf>
void run_block_tiles(const LinearInput<bfloat16>& p, BlockFormat format, const LinearTiles&, std::int64_t begin,
                     std::int64_t end, const StripOf& strip_of, const StoreOf& store_of) {
  using V = ShortVec<float>;
  constexpr std::int64_t kWidth = kStrips * kLinearTileN;
  alignas(64) float by_column[kWidth * kMostRows], sums[V::kLanes * kWidth];
  Tiles tiles;
  for (std::int64_t t = begin; t < end; ++t) {
    for (int i = 0; i < kStrips; ++i)
      with_constant<2>(p.M > kTileRows ? 2 : 1, [&](auto columns) {
        float* const out = by_column + i * kLinearTileN * kMostRows;
        const auto strip = strip_of(t, i);
        with_format(format, [&](auto f) { multiply_strip<f(), columns()>(tiles, strip, p, out); });
      });
    const auto store = store_of(t);
    for (std::int64_t first = 0; first < p.M; first += V::kLanes) {
      turn_sums<V>(by_column, static_cast<int>(kMostRows), static_cast<int>(first), static_cast<int>(kWidth), kWidth,
                   sums);
      for (int m = 0; m < V::kLanes && first + m < p.M; ++m) store(first + m, sums + m * kWidth);
    }
  }
}

template <int kStrips>
constexpr auto kRunTiles = [](const auto&... of) { run_block_tiles<kStrips>(of...); };

}  // namespace

bool block_weights_are_single() { return false; }
std::int64_t block_product_rows(BlockFormat) { return kMostRows; }
void linear_pack_for_blocks(BlockFormat, const LinearInput<bfloat16>& p, std::int64_t b, std::int64_t e) {
  linear_pack_bf16(p, b, e);
}

void linear_forward_blocks_bf16(const LinearForwardArgs<bfloat16, bfloat16>& p, const WeightBlocks& w, std::int64_t b,
                                std::int64_t e, bool more) {
  forward_blocks(p, w, b, e, more, kRunTiles<1>);
}
void linear_forward_blocks_bf16_f32(const LinearForwardArgs<bfloat16, float>& p, const WeightBlocks& w, std::int64_t b,
                                    std::int64_t e, bool more) {
  forward_blocks(p, w, b, e, more, kRunTiles<1>);
}

void linear_swiglu_blocks_bf16(const LinearSwigluArgs<bfloat16>& p, const WeightBlocks& w, std::int64_t b,
                               std::int64_t e, bool more) {
  swiglu_blocks(p, w, b, e, more, kRunTiles<2>);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
