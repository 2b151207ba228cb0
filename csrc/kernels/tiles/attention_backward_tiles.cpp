// Attention's backward where tiles multiply bfloat16; other types take the vectors of the same capability. For a block
// of query rows and a tile of 32 keys:
//   scores = q · keys and dP = d_out · values    steps of 32 terms of the head
//   P and dS, rounded to bfloat16 (kernels/attention.h)
//   d_q += dS · keys                             one step, the 32 keys
//   d_valuesᵀ += d_outᵀ · P, d_keysᵀ += qᵀ · dS  steps of 32 rows, the last one filled up with zeros
// The last two are kept turned, [H][32 keys]: then q and d_out are turned once a block, and P and dS not at all.
#include <type_traits>

#include "kernels/cpu/attention_backward_rows.h"
#include "kernels/tiles/attention_tiles.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

constexpr std::int64_t kTileWords = kTilePairs * kTileRows;

/// Tiles of one run of keys and the sums of their gradients.
struct TileKeys {
  using Word = std::uint32_t;
  Word *keys_t, *values_t;   ///< [tile], as pack_terms packs them
  Word* keys;                ///< [tile], as pack_keys_in_pairs packs them
  float *d_keys, *d_values;  ///< [tile][stride][kTile]; after turn_back [tile][kTile][stride]
  std::int64_t tiles, head_dim, stride;

  static std::size_t bytes(std::int64_t keys, std::int64_t head_dim, std::int64_t stride) {
    return static_cast<std::size_t>(round_up(keys, kTile) / kTile) *
           (2 * key_tile_words(head_dim) + value_tile_words(head_dim) + 2 * kTile * stride) * sizeof(Word);
  }
  TileKeys(std::byte* memory, std::int64_t count, std::int64_t head_dim, std::int64_t stride)
      : tiles(round_up(count, kTile) / kTile), head_dim(head_dim), stride(stride) {
    d_keys = reinterpret_cast<float*>(memory);
    d_values = d_keys + tiles * kTile * stride;
    keys_t = reinterpret_cast<Word*>(d_values + tiles * kTile * stride);
    values_t = keys_t + tiles * key_tile_words(head_dim);
    keys = values_t + tiles * key_tile_words(head_dim);
    fill(d_keys, 2 * tiles * kTile * stride, 0.0f);
  }
  void pack(std::int64_t slot, std::int64_t tile, const SegmentRows<bfloat16>& key_rows,
            const SegmentRows<bfloat16>& value_rows, std::int64_t head_dim) {
    pack_terms(key_rows, tile, head_dim, keys_t + slot * key_tile_words(head_dim));
    pack_terms(value_rows, tile, head_dim, values_t + slot * key_tile_words(head_dim));
    pack_keys_in_pairs(key_rows, tile, head_dim, keys + slot * value_tile_words(head_dim));
  }
  /// As KeyTiles::add_first_rows; before turn_back.
  void add_first_rows(std::int64_t count, const TileKeys& to, std::int64_t slot) const {
    if (count == 0) return;
    for (std::int64_t h = 0; h < stride; ++h)
      for (std::int64_t j = 0; j < count; ++j) {
        const std::int64_t from = h * kTile + j, at = slot * stride * kTile + from;
        to.d_keys[at] += d_keys[from];
        to.d_values[at] += d_values[from];
      }
  }
  /// Turns the sums, so that those of a key are a row.
  void turn_back() const {
    alignas(64) float turned[kMostWidth * kTile];
    for (float* const sums : {d_keys, d_values})
      for (std::int64_t t = 0; t < tiles; ++t) {
        float* const tile = sums + t * stride * kTile;
        for (std::int64_t h = 0; h < stride; ++h)
          for (int j = 0; j < kTile; ++j) turned[j * stride + h] = tile[h * kTile + j];
        copy(turned, stride * kTile, tile);
      }
  }
};

/// A block of query rows in the backward; acc is d_q, weights are dS. Rows are filled up to steps of 32 with zeros.
struct TileBackwardRows : TileRows {
  using Keys = TileKeys;
  float* d_scores;                   ///< [rows][kTile]
  float *log_sum, *dot;              ///< [rows]: log2 of the softmax's sum; d_out . out
  bfloat16* d_out;                   ///< [rows][steps * 32], zeros behind H
  Word *q_t, *d_out_t;               ///< [acc_stride / 16][steps of rows], tiles of 16 columns of the head and 32 rows
  Word *p_by_row, *d_scores_by_row;  ///< [pairs of rows][kTile]
  std::int64_t row_steps;

  static std::int64_t stride(std::int64_t head_dim) { return tile_width(head_dim); }
  static float key_factor(const AttentionShape& shape) { return static_cast<float>(shape.scale); }
  static std::int64_t most_rows(const AttentionShape& shape) {
    return round_up(attention_query_tokens(shape.group()) * shape.group(), kTileTerms);
  }
  static std::size_t base_bytes(const AttentionShape& shape) { return bytes_of_rows(shape, most_rows(shape)); }
  static std::size_t bytes(const AttentionShape& shape) {
    const std::int64_t H = shape.head_dim, words = kTile + 2 + tile_steps(H) * kTilePairs + tile_width(H) + kTile;
    return base_bytes(shape) + round_up(most_rows(shape) * words * sizeof(Word), 64);
  }

  TileBackwardRows(Tiles& tiles, const AttentionShape& shape, std::byte* workspace)
      : TileRows(tiles, shape, workspace, MostRows{most_rows(shape)}) {
    const std::int64_t most = most_rows(shape);
    d_scores = reinterpret_cast<float*>(workspace + base_bytes(shape));
    q_t = reinterpret_cast<Word*>(d_scores + most * kTile);
    d_out_t = q_t + most / 2 * acc_stride;
    p_by_row = d_out_t + most / 2 * acc_stride;
    d_scores_by_row = p_by_row + most / 2 * kTile;
    d_out = reinterpret_cast<bfloat16*>(d_scores_by_row + most / 2 * kTile);
    log_sum = reinterpret_cast<float*>(d_out + most * steps * kTileTerms);
    dot = log_sum + most;
  }

  /// As BackwardRows::begin_backward.
  template <class Grad>
  void begin_backward(const AttentionShape& shape, const bfloat16* queries, const bfloat16* out, const Grad* grad,
                      const float* lse, std::int64_t block_tokens, std::int64_t first_position) {
    const std::int64_t out_stride = shape.num_heads * head_dim, terms = steps * kTileTerms;
    place(block_tokens, first_position);
    begin(queries, shape.row_stride(), nullptr);
    row_steps = tile_steps(rows);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t at = r / group * out_stride + r % group * head_dim;
      for (std::int64_t h = 0; h < head_dim; ++h) d_out[r * terms + h] = bfloat16(static_cast<float>(grad[at + h]));
      fill(d_out + r * terms + head_dim, terms - head_dim, bfloat16{});
      log_sum[r] = lse[r / group * shape.num_heads + r % group] * static_cast<float>(kLog2E);
      dot[r] = dot_product(d_out + r * terms, out + at);
    }
    fill(d_out + rows * terms, (round_up(rows, kTileRows) - rows) * terms, bfloat16{});
    turn_rows(q, q_t);
    turn_rows(d_out, d_out_t);
    const std::int64_t pairs = (rows + 1) / 2 * kTile, all = row_steps * kTilePairs * kTile;
    fill(p_by_row + pairs, all - pairs, Word{0});
    fill(d_scores_by_row + pairs, all - pairs, Word{0});
  }

  float dot_product(const bfloat16* g, const bfloat16* o) const {
    Floats total(0.0f);
    for (std::int64_t h = 0; h < head_dim; h += kLanes) {
      const int n = static_cast<int>(smaller<std::int64_t>(kLanes, head_dim - h));
      total = n == kLanes ? mul_add(load<Floats>(g + h), load<Floats>(o + h), total)
                          : mul_add(load<Floats>(g + h, n), load<Floats>(o + h, n), total);
    }
    return static_cast<float>(sum_ascending(total));
  }

  /// Columns of the rows of `from` as rows of operand A.
  void turn_rows(const bfloat16* from, Word* to) const {
    const std::int64_t terms = steps * kTileTerms;
    for (std::int64_t h = 0; h < acc_stride; h += kTileRows)
      for (std::int64_t s = 0; s < row_steps; ++s, to += kTileWords) {
        alignas(64) Word square[kTilePairs][kTileRows];
        for (std::int64_t i = 0; i < kTilePairs; ++i) {
          const std::int64_t r = s * kTileTerms + 2 * i;
          const bfloat16* const row = from + r * terms + h;
          join_pairs(r < rows ? row : nullptr, r + 1 < rows ? row + terms : nullptr, kTileRows, square[i]);
        }
        turn_words(square, to);
      }
  }

  /// Scores of row r and dP become P and dS, sixteen keys from `lane` on; what the row does not see becomes zero.
  struct Weights {
    Floats p, d_score;
  };
  NRL_INLINE_MEMBER Weights weights_of(std::int64_t r, int before, int keys, int lane) const {
    Floats x = load<Floats>(scores + r * kTile + lane) * score_scale, t(0.0f);
    if (softcap != 0) t = tanh_of(x * (1 / softcap)), x = t * softcap;
    Floats p = exp2_of(x - log_sum[r]);
    Floats g = p * (load<Floats>(d_scores + r * kTile + lane) - dot[r]);
    if (softcap != 0) g = g * (Floats(1.0f) - t * t);
    p = first_lanes_of(p, keys - lane, 0.0f), g = first_lanes_of(g, keys - lane, 0.0f);
    if (before <= lane) return {p, g};
    return {without_first_lanes(p, before - lane, 0.0f), without_first_lanes(g, before - lane, 0.0f)};
  }

  /// Sixteen words: `first` rounded to bfloat16 below `second`.
  static NRL_INLINE_MEMBER void store_pairs(Word* to, Floats first, Floats second) {
    alignas(64) bfloat16 low[kLanes], high[kLanes];
    store(low, first);
    store(high, second);
    join_pairs(low, high, kLanes, to);
  }

  /// P and dS of two rows.
  void weights_rows(std::int64_t r, std::int64_t t) {
    const int keys = visible(r / group, t), more = r + 1 < rows ? visible((r + 1) / group, t) : 0;
    for (int lane = 0; lane < kTile; lane += kLanes) {
      Weights first = weights_of(r, hidden(r / group, t), keys, lane), second{Floats(0.0f), Floats(0.0f)};
      if (more > 0) second = weights_of(r + 1, hidden((r + 1) / group, t), more, lane);
      store(weights + r * kTile + lane, first.d_score);
      store(weights + (r + 1) * kTile + lane, second.d_score);  // of an odd last row: in the room behind it
      store_pairs(p_by_row + r / 2 * kTile + lane, first.p, second.p);
      store_pairs(d_scores_by_row + r / 2 * kTile + lane, first.d_score, second.d_score);
    }
  }

  /// Tile t, which lies at `slot` of `tiles`.
  void add_tile_backward(std::int64_t t, const TileKeys& tiles, std::int64_t slot) {
    score(t, q, tiles.keys_t + slot * key_words(head_dim), scores);
    score(t, d_out, tiles.values_t + slot * key_words(head_dim), d_scores);
    for (std::int64_t r = 0; r < rows; r += 2) weights_rows(r, t);
    add_rows(tiles.keys + slot * value_words(head_dim), acc);
    add_outer(t, d_out_t, p_by_row, tiles.d_values + slot * acc_stride * kTile);
    add_outer(t, q_t, d_scores_by_row, tiles.d_keys + slot * acc_stride * kTile);
  }

  /// to[h][j] += sum_r x[r][h] * w[r][j].
  void add_outer(std::int64_t t, const Word* x_t, const Word* w, float* to) const {
    constexpr std::int64_t kStep = kTileWords * static_cast<std::int64_t>(sizeof(Word));
    tile_product<true>(*unit, {reinterpret_cast<const char*>(x_t), kTileBytes, kStep}, row_steps * kStep, acc_stride,
                       {w, kTile, kTilePairs * kTile}, kTileRows, visible(tokens - 1, t), row_steps, to, kTile);
  }
};

template <class Elem>
using BlockOf = std::conditional_t<sizeof(Elem) == sizeof(bfloat16), TileBackwardRows, BackwardRows<Elem>>;

}  // namespace

std::size_t attention_backward_workspace(const AttentionShape& shape, std::int64_t owner_keys,
                                         std::int64_t sharer_keys) {
  return with_element(
      shape.type, [&](auto elem) { return backward_bytes<BlockOf<decltype(elem)>>(shape, owner_keys, sharer_keys); });
}

void attention_backward_job(const AttentionBackwardArgs& args, const AttentionBackwardJob& job, std::int64_t kv_head,
                            std::byte* workspace) {
  with_element(args.shape.type, [&](auto elem) {
    using Block = BlockOf<decltype(elem)>;
    with_gradient<decltype(elem)>(args, [&](auto grad) {
      Job<Block, decltype(grad)>(args, kv_head, workspace).run(job, workspace + Block::bytes(args.shape));
    });
  });
}

void attention_backward_reduce(const AttentionBackwardArgs& args, const AttentionBackwardJob* jobs, std::int64_t count,
                               std::int64_t kv_head, std::int64_t key_begin, std::int64_t key_end) {
  with_element(args.shape.type, [&](auto elem) {
    with_gradient<decltype(elem)>(args, [&](auto grad) {
      reduce<BlockOf<decltype(elem)>, decltype(grad)>(args, jobs, count, kv_head, key_begin, key_end);
    });
  });
}

}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
