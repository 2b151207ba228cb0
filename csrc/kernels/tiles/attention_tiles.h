// A block of query rows against a tile of keys, where tiles multiply: QueryRows (kernels/cpu/attention_tile.h) with
// other products and an order of sums of its own. Keys come in tiles of 32 absolute positions, which is one step of the
// instruction:
//   scores        steps of 32 terms of the head
//   acc           acc * r (denormals become zero), then one step: the 32 keys of the tile
//   sum of w      lane i of sixteen adds w(i) + w(i + 16) of each tile; at the end the lanes in ascending order
// Keys that a row does not see have the weight zero. What the tile holds there must not count: numbers do not, and
// where there is an infinity or a NaN, the rows of each token are multiplied apart, without the values behind it.
#pragma once
#include <cfloat>

#include "kernels/cpu/attention_tile.h"
#include "kernels/tiles/tile_block.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

static_assert(kTile == kTileTerms);
constexpr int kMostWidth = kMostHeadDim;

/// Whether no bfloat16 of these words is an infinity or a NaN.
inline bool are_finite(const std::uint32_t* words, std::int64_t n) {
  std::uint32_t found = 0;
  for (std::int64_t i = 0; i < n; ++i)
    found |= ((words[i] & 0x7f80u) == 0x7f80u) | ((words[i] & 0x7f800000u) == 0x7f800000u);
  return found == 0;
}

/// 2^x, sixteen lanes.
NRL_VEC Floats exp2_of(Floats x) {
  for (auto& part : x.part) part = exp2_of(part);
  return x;
}

alignas(64) constexpr float kLaneIndex[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

NRL_VEC Floats tanh_of(Floats x) {
  for (auto& part : x.part) part = tanh_of(part);
  return x;
}

/// The first `count` lanes of x, then `rest`.
NRL_VEC Floats first_lanes_of(Floats x, int count, float rest) {
  return select(load<Floats>(kLaneIndex) < Floats(static_cast<float>(count)), x, Floats(rest));
}

/// `rest` in the first `count` lanes, then x.
NRL_VEC Floats without_first_lanes(Floats x, int count, float rest) {
  return select(load<Floats>(kLaneIndex) < Floats(static_cast<float>(count)), Floats(rest), x);
}

/// A tile of keys in words [terms of the head in pairs][kTile], whole steps of terms; one of values [kTile / 2][width].
constexpr std::int64_t tile_width(std::int64_t head_dim) { return (head_dim + kTileRows - 1) / kTileRows * kTileRows; }
constexpr std::int64_t key_tile_words(std::int64_t head_dim) { return tile_steps(head_dim) * kTilePairs * kTile; }
constexpr std::int64_t value_tile_words(std::int64_t head_dim) { return kTile / 2 * tile_width(head_dim); }

/// Packs a tile of keys (or of values, for the backward) as what scores multiply.
inline void pack_terms(const SegmentRows<bfloat16>& rows, std::int64_t t, std::int64_t head_dim, std::uint32_t* to) {
  pack_transposed(rows, t, head_dim, to);
  const std::int64_t used = head_dim / 2 * kTile;
  fill(to + used, key_tile_words(head_dim) - used, std::uint32_t{0});
}

/// Packs a tile of rows as what weights multiply.
inline void pack_keys_in_pairs(const SegmentRows<bfloat16>& rows, std::int64_t t, std::int64_t head_dim,
                               std::uint32_t* to) {
  const std::int64_t width = tile_width(head_dim);
  const auto row = [&](std::int64_t position) { return position < rows.length ? rows.row(position) : nullptr; };
  for (std::int64_t i = 0; i < kTile; i += 2, to += width) {
    join_pairs(row(t * kTile + i), row(t * kTile + i + 1), head_dim, to);
    fill(to + head_dim, width - head_dim, std::uint32_t{0});
  }
}

/// Query rows, token by token, and their running state. Behind the last row lies room up to a tile of the unit's rows.
struct TileRows {
  using Elem = bfloat16;
  using Real = float;
  using Word = std::uint32_t;
  using Cache = PairCache;
  using Unit = Tiles;
  /// What multiplies blocks of up to so many rows: a token's few query rows need not be filled up to sixteen.
  static Tiles unit_of(std::int64_t rows) { return Tiles(static_cast<int>(clamped(rows, 1, kTileRows))); }
  Tiles* unit;
  std::int64_t head_dim, group, window, tokens, rows;
  std::int64_t steps;       ///< of the head's terms
  std::int64_t acc_stride;  ///< columns of acc: H in whole tiles
  std::int64_t position;    ///< absolute position of the first token
  float score_scale;        ///< natural scale * log2(e)
  float softcap;            ///< softcap * log2(e); 0: none
  float* acc;               ///< [rows][acc_stride]
  float* scores;            ///< [rows][kTile]
  float* sum;               ///< [rows][kLanes]
  float* max;               ///< [rows]
  Word* room;               ///< a tile of keys and one of values from the cache
  bfloat16* q;              ///< [rows][steps * 32] queries, zeros behind H
  bfloat16* weights;        ///< [rows][kTile]

  static std::int64_t key_words(std::int64_t head_dim) { return key_tile_words(head_dim); }
  static std::int64_t value_words(std::int64_t head_dim) { return value_tile_words(head_dim); }
  static void pack_keys(const SegmentRows<bfloat16>& from, std::int64_t t, std::int64_t head_dim, Word* to) {
    pack_terms(from, t, head_dim, to);
  }
  static void pack_values(const SegmentRows<bfloat16>& from, std::int64_t t, std::int64_t head_dim, Word* to) {
    pack_keys_in_pairs(from, t, head_dim, to);
  }

  /// For blocks of at most so many rows.
  static std::size_t bytes_of_rows(const AttentionShape& shape, std::int64_t most) {
    const std::int64_t H = shape.head_dim, floats = tile_width(H) + kTile + kLanes + 1,
                       halves = tile_steps(H) * kTileTerms + kTile;
    return round_up(
        (round_up(most, kTileRows) * (2 * floats + halves) + 2 * (key_words(H) + value_words(H))) * sizeof(bfloat16),
        64);
  }
  /// For blocks of at most `most` tokens.
  static std::size_t bytes(const AttentionShape& shape, std::int64_t most) {
    return bytes_of_rows(shape, most * shape.group());
  }

  TileRows(Tiles& tiles, const AttentionShape& shape, std::byte* workspace, std::int64_t most)
      : TileRows(tiles, shape, workspace, MostRows{most * shape.group()}) {}
  struct MostRows {
    std::int64_t count;
  };
  TileRows(Tiles& tiles, const AttentionShape& shape, std::byte* workspace, MostRows most)
      : unit(&tiles),
        head_dim(shape.head_dim),
        group(shape.group()),
        window(shape.window),
        steps(tile_steps(head_dim)),
        acc_stride(tile_width(head_dim)),
        score_scale(static_cast<float>(shape.scale * kLog2E)),
        softcap(static_cast<float>(shape.softcap * kLog2E)) {
    const std::int64_t lines = round_up(most.count, kTileRows);
    acc = reinterpret_cast<float*>(workspace);
    scores = acc + lines * acc_stride;
    sum = scores + lines * kTile;
    room = reinterpret_cast<Word*>(sum + lines * kLanes);
    q = reinterpret_cast<bfloat16*>(room + key_words(head_dim) + value_words(head_dim));
    weights = q + lines * steps * kTileTerms;
    max = reinterpret_cast<float*>(weights + lines * kTile);
  }

  void place(std::int64_t tokens_, std::int64_t position_) {
    tokens = tokens_;
    rows = tokens * group;
    position = position_;
  }

  /// As QueryRows::begin.
  void begin(const bfloat16* first, std::int64_t token_stride, const bfloat16* sinks) {
    const std::int64_t lines = round_up(rows, unit->rows()), terms = steps * kTileTerms;
    for (std::int64_t r = 0; r < rows; ++r) {
      copy(first + r / group * token_stride + r % group * head_dim, head_dim, q + r * terms);
      fill(q + r * terms + head_dim, terms - head_dim, bfloat16{});
    }
    fill(q + rows * terms, (lines - rows) * terms, bfloat16{});
    fill(weights + rows * kTile, (lines - rows) * kTile, bfloat16{});
    fill(acc, lines * acc_stride, 0.0f);
    fill(sum, lines * kLanes, 0.0f);
    fill(max, lines, -static_cast<float>(__builtin_inf()));
    if (sinks != nullptr) begin_with_sinks(sinks, rows, group, max, sum, kLanes);
  }

  /// Keys of tile `t` that a token of this block may see. A block lies within one tile of positions, so every row sees
  /// at least the first key of every tile that it meets, unless that lies before its window.
  int visible(std::int64_t token, std::int64_t t) const {
    return static_cast<int>(clamped(position + token + 1 - t * kTile, 0, kTile));
  }
  /// As of QueryRows.
  int hidden(std::int64_t token, std::int64_t t) const {
    return window == 0 ? 0 : static_cast<int>(clamped(position + token + 1 - window - t * kTile, 0, kTile));
  }
  std::int64_t first_tile() const { return window == 0 ? 0 : larger<std::int64_t>(0, position + 1 - window) / kTile; }
  std::int64_t tiles() const { return (position + tokens - 1) / kTile + 1; }

  /// to[r][j] = x[r] . key j for the keys that some row sees.
  void score(std::int64_t t, const bfloat16* x, const Word* keys, float* to) const {
    const std::int64_t row_bytes = steps * kTileBytes;
    tile_product<false>(*unit, {reinterpret_cast<const char*>(x), row_bytes, kTileBytes}, kTileRows * row_bytes, rows,
                        {keys, kTile, kTilePairs * kTile}, kTileRows, visible(tokens - 1, t), steps, to, kTile);
  }

  /// to[r] += weights of row r times the 32 rows of a tile.
  void add_rows(const Word* pairs, float* to) const {
    tile_product<true>(*unit, {reinterpret_cast<const char*>(weights), kTileBytes, 0}, kTileRows * kTileBytes, rows,
                       {pairs, acc_stride, 0}, kTileRows, acc_stride, 1, to, acc_stride);
  }

  /// As QueryRows::softmax_row.
  void softmax_row(std::int64_t r, int before, int keys) {
    const float minus_infinity = -static_cast<float>(__builtin_inf());
    if (before == kTile) return fill(weights + r * kTile, kTile, bfloat16{});
    Floats low = load<Floats>(scores + r * kTile) * score_scale,
           high = load<Floats>(scores + r * kTile + kLanes) * score_scale;
    if (softcap != 0) low = tanh_of(low * (1 / softcap)) * softcap, high = tanh_of(high * (1 / softcap)) * softcap;
    if (keys < kTile) {
      low = first_lanes_of(low, keys, minus_infinity);
      high = first_lanes_of(high, keys - kLanes, minus_infinity);
    }
    if (before > 0) {
      low = without_first_lanes(low, before, minus_infinity);
      high = without_first_lanes(high, before - kLanes, minus_infinity);
    }
    const float new_max = larger(max[r], largest_of(max_of(low, high)));
    low = exp2_of(low - new_max), high = exp2_of(high - new_max);
    store(weights + r * kTile, low);
    store(weights + r * kTile + kLanes, high);
    Floats running = load<Floats>(sum + r * kLanes);
    if (new_max != max[r]) {  // otherwise the factor is exactly 1
      const float factor = exp2_of(max[r] - new_max);
      max[r] = new_max;
      running = running * factor;
      for (float* a = acc + r * acc_stride; a < acc + (r + 1) * acc_stride; a += kLanes) {
        Floats scaled = load<Floats>(a) * factor;
        store(a, select(abs_of(scaled) < Floats(FLT_MIN), Floats(0.0f), scaled));
      }
    }
    store(sum + r * kLanes, running + (low + high));
  }

  /// Adds tile t, packed or as it lies in the cache.
  template <class Rows>
  void add_tile(std::int64_t t, const Rows& key_tile, const Rows& value_tile) {
    if constexpr (sizeof(*key_tile.data) == sizeof(bfloat16)) {
      add_cached(t, reinterpret_cast<const Word*>(key_tile.data), reinterpret_cast<const Word*>(value_tile.data));
    } else {
      add_packed(t, key_tile.data, value_tile.data);
    }
  }

  /// A block of the cache (PairCache). It is multiplied where it lies. Only values that some token does not see are
  /// copied, because what the cache holds there may be anything.
  void add_cached(std::int64_t t, const Word* keys, const Word* values) {
    const bool is_whole = head_dim % kTileTerms == 0;  // otherwise a tile would reach beyond it
    const int seen = visible(tokens - 1, t);
    if (!is_whole) {
      __builtin_memcpy(room, keys, head_dim / 2 * kTile * sizeof(Word));
      fill(room + head_dim / 2 * kTile, key_words(head_dim) - head_dim / 2 * kTile, Word{0});
      keys = room;
    }
    if (!is_whole || visible(0, t) < kTile) {
      Word* const clean = room + key_words(head_dim);
      copy_seen(values, seen, clean);
      values = clean;
    }
    if (tokens > 1) return add_packed(t, keys, values);
    score(t, q, keys, scores);
    for (std::int64_t r = 0; r < rows; ++r) softmax_row(r, hidden(0, t), seen);
    add_rows(values, acc);
  }

  void add_packed(std::int64_t t, const Word* keys, const Word* values) {
    score(t, q, keys, scores);
    for (std::int64_t token = 0, r = 0; token < tokens; ++token)
      for (const std::int64_t end = r + group; r < end; ++r) softmax_row(r, hidden(token, t), visible(token, t));
    if (visible(0, t) == kTile || are_finite(values, value_words(head_dim))) return add_rows(values, acc);
    for (std::int64_t token = 0; token < tokens; ++token) add_token(token, visible(token, t), values);
  }

  /// The first `seen` values of a block of the cache, zeros behind them.
  void copy_seen(const Word* values, int seen, Word* to) const {
    for (std::int64_t i = 0; i < kTile / 2; ++i, values += head_dim, to += acc_stride) {
      std::int64_t h = 0;
      if (2 * i < seen)
        for (const Word mask = 2 * i + 1 < seen ? ~Word{0} : Word{0xffff}; h < head_dim; ++h) {
          Word pair;
          __builtin_memcpy(&pair, values + h, sizeof(pair));
          to[h] = pair & mask;
        }
      fill(to + h, acc_stride - h, Word{0});
    }
  }

  /// The rows of one token, with the values that it sees.
  void add_token(std::int64_t token, int seen, const Word* values) {
    alignas(64) Word clean[kTile / 2 * kMostWidth];
    alignas(64) float sums[kTileRows * kMostWidth];
    alignas(64) bfloat16 own[kTileRows * kTile] = {};
    copy(values, value_words(head_dim), clean);
    for (int i = seen / 2; i < kTile / 2; ++i)
      for (std::int64_t h = 0; h < acc_stride; ++h)
        clean[i * acc_stride + h] &= i == seen / 2 && seen % 2 != 0 ? 0xffffu : 0u;
    for (std::int64_t r = token * group, end = r + group; r < end; r += kTileRows) {
      const std::int64_t n = smaller<std::int64_t>(kTileRows, end - r);
      copy(weights + r * kTile, n * kTile, own);
      fill(sums, kTileRows * acc_stride, 0.0f);
      copy(acc + r * acc_stride, n * acc_stride, sums);
      tile_product<true>(*unit, {reinterpret_cast<const char*>(own), kTileBytes, 0}, 0, kTileRows,
                         {clean, acc_stride, 0}, kTileRows, acc_stride, 1, sums, acc_stride);
      copy(sums, n * acc_stride, acc + r * acc_stride);
    }
  }

  /// As QueryRows::finish. A zero is positive: the sign of a sum of nothing may come from values that do not count.
  void finish(bfloat16* out, std::int64_t token_stride, float* lse, std::int64_t lse_stride) const {
    for (std::int64_t token = 0, r = 0; token < tokens; ++token)
      for (std::int64_t i = 0; i < group; ++i, ++r) {
        const auto total = static_cast<float>(sum_ascending(load<Floats>(sum + r * kLanes)));
        bfloat16* const to = out + token * token_stride + i * head_dim;
        for (std::int64_t h = 0; h < head_dim; h += kLanes) {
          Floats x = load<Floats>(acc + r * acc_stride + h) * (1.0f / total) + 0.0f;
          if (h + kLanes <= head_dim) store(to + h, x);
          else store(to + h, x, static_cast<int>(head_dim - h));
        }
        if (lse != nullptr) lse[token * lse_stride + i] = 0.69314718055994530942f * (max[r] + std::log2(total));
      }
  }
};

}  // namespace
}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
