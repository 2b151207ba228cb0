// Causal attention, forward: packed sequences and sequences in a blocked cache run the same tiles of keys. `Rows` is a
// block of query rows with its arithmetic: QueryRows (attention_tile.h), or TileRows where tiles multiply
// (kernels/tiles/attention_tiles.h).
#pragma once
#include "kernels/cpu/attention_tile.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

/// Of a block of query tokens of one kv head, or of one token of every kv head.
template <class Rows>
std::size_t query_rows_bytes(const AttentionShape& shape) {
  const std::size_t block = Rows::bytes(shape, attention_query_tokens(shape.group()));
  return round_up(larger<std::size_t>(block, shape.num_kv_heads * Rows::bytes(shape, 1)), 64);
}

/// Query tokens of one sequence: `first` points to the first one's first head, `position` is its own.
template <class Elem, class Real>
struct Queries {
  const Elem* first;
  std::int64_t position, begin, end;  ///< tokens [begin, end) after it
  Elem* out;                          ///< of the first one
  Real* lse;                          ///< likewise; nullptr: not wanted
  const Elem* sinks;                  ///< from the first head on; nullptr: none
};

template <class Elem>
const Elem* first_sink(const void* sinks, std::int64_t head) {
  return sinks == nullptr ? nullptr : static_cast<const Elem*>(sinks) + head;
}

/// Queries over the tiles of `heads` kv heads. Several heads go through the tiles side by side, for a single token
/// only: then all that a block of the cache holds is read in one go, as the machine's own prefetching likes it.
template <class Rows, class Elem, class Real, class Tiles>
void attend(typename Rows::Unit& unit, const AttentionShape& shape, std::byte* workspace, const Tiles& tiles,
            std::int64_t heads, const Queries<Elem, Real>& queries) {
  const std::int64_t most = heads > 1 ? 1 : attention_query_tokens(shape.group());
  const std::int64_t size = Rows::bytes(shape, most);
  const std::int64_t stride = shape.row_stride(), out_stride = shape.num_heads * shape.head_dim,
                     head_step = shape.group() * shape.head_dim;
  for (std::int64_t token = queries.begin; token < queries.end;) {
    // blocks end at multiples of `most`, so that only a block's last tile is cut by causality
    const std::int64_t position = queries.position + token,
                       next = smaller(queries.end, round_up(position + 1, most) - queries.position);
    const auto rows_of = [&](std::int64_t head) {
      Rows rows(unit, shape, workspace + head * size, most);
      rows.place(next - token, position);
      return rows;
    };
    for (std::int64_t head = 0; head < heads; ++head)
      rows_of(head).begin(queries.first + token * stride + head * head_step, stride,
                          queries.sinks == nullptr ? nullptr : queries.sinks + head * shape.group());
    for (std::int64_t t = rows_of(0).first_tile(), count = rows_of(0).tiles(); t < count; ++t)
      for (std::int64_t head = 0; head < heads; ++head)
        rows_of(head).add_tile(t, tiles.key_tile(t, head), tiles.value_tile(t, head));
    for (std::int64_t head = 0; head < heads; ++head)
      rows_of(head).finish(
          queries.out + token * out_stride + head * head_step, out_stride,
          queries.lse == nullptr ? nullptr : queries.lse + token * shape.num_heads + head * shape.group(),
          shape.num_heads);
    token = next;
  }
}

template <class Rows>
void forward_item(const AttentionForwardArgs& args, const AttentionItem& item, std::byte* workspace) {
  using Elem = typename Rows::Elem;
  using Real = typename Rows::Real;
  using Word = typename Rows::Word;
  typename Rows::Unit unit;
  const AttentionShape& shape = args.shape;
  const std::int64_t stride = shape.row_stride(), head_dim = shape.head_dim, first_head = item.kv_head * shape.group();
  const auto* qkv = static_cast<const Elem*>(args.qkv);
  const Elem* keys = qkv + (shape.num_heads + item.kv_head) * head_dim;
  const Elem* values = keys + shape.num_kv_heads * head_dim;

  auto* key_tiles = reinterpret_cast<Word*>(workspace + query_rows_bytes<Rows>(shape));
  const std::int64_t key_words = Rows::key_words(head_dim), value_words = Rows::value_words(head_dim);
  std::int64_t most_keys = 0;
  for (auto i = item.sequence_begin; i < item.sequence_end; ++i)
    most_keys = larger(most_keys, args.sequences[i].prefix_length + smaller(args.sequences[i].length, item.token_end));
  Word* value_tiles = key_tiles + round_up(most_keys, kTile) / kTile * key_words;

  std::int64_t packed = 0;  // whole tiles of the common prefix that are in place already
  for (auto i = item.sequence_begin; i < item.sequence_end; ++i) {
    const AttentionSequence& sequence = args.sequences[i];
    const std::int64_t end = smaller(sequence.length, item.token_end), total = sequence.prefix_length + end;
    const SegmentRows<Elem> key_rows{keys + sequence.prefix_start * stride, keys + sequence.start * stride,
                                     sequence.prefix_length, total, stride};
    const SegmentRows<Elem> value_rows{values + sequence.prefix_start * stride, values + sequence.start * stride,
                                       sequence.prefix_length, total, stride};
    const std::int64_t first = shape.first_key(sequence.prefix_length + item.token_begin) / kTile;
    for (std::int64_t t = larger(packed, first); t * kTile < total; ++t) {
      Rows::pack_keys(key_rows, t, head_dim, key_tiles + t * key_words);
      Rows::pack_values(value_rows, t, head_dim, value_tiles + t * value_words);
    }
    packed = sequence.prefix_length / kTile;
    const std::int64_t out_offset = sequence.start * shape.num_heads + first_head;
    const PackedTiles<Word> tiles{key_tiles, value_tiles, head_dim, key_words, value_words};
    const Queries<Elem, Real> queries{qkv + sequence.start * stride + first_head * head_dim,
                                      sequence.prefix_length,
                                      item.token_begin,
                                      end,
                                      static_cast<Elem*>(args.out) + out_offset * head_dim,
                                      args.lse == nullptr ? nullptr : static_cast<Real*>(args.lse) + out_offset,
                                      first_sink<Elem>(args.sinks, first_head)};
    attend<Rows>(unit, shape, workspace, tiles, 1, queries);
  }
}

template <class Rows>
void paged_item(const PagedAttentionArgs& args, const PagedItem& item, std::byte* workspace) {
  using Elem = typename Rows::Elem;
  using Real = typename Rows::Real;
  const AttentionShape& shape = args.shape;
  const std::int64_t kv_heads = shape.num_kv_heads, head_dim = shape.head_dim, tile_size = head_dim * kTile;
  const auto* qkv = static_cast<const Elem*>(args.qkv);
  auto* cache = static_cast<Elem*>(args.cache);
  std::int64_t most_tokens = 0;
  for (std::int64_t pair = item.pair_begin; pair < item.pair_end; pair += kv_heads - pair % kv_heads)
    most_tokens = larger(most_tokens, args.slices[pair / kv_heads].query_length);
  typename Rows::Unit unit = Rows::unit_of(most_tokens * shape.group());
  const auto tiles_of = [&](std::int64_t pair) {
    return CachedTiles<Elem>{cache + pair % kv_heads * 2 * tile_size, args.slices[pair / kv_heads].block_table,
                             kv_heads * 2 * tile_size, head_dim, tile_size};
  };
  for (std::int64_t pair = item.pair_begin; pair < item.pair_end;) {
    const PagedSlice& slice = args.slices[pair / kv_heads];
    const std::int64_t kv_head = pair % kv_heads, first_head = kv_head * shape.group();
    const std::int64_t heads = slice.query_length == 1 ? smaller(kv_heads - kv_head, item.pair_end - pair) : 1,
                       next = pair + heads;
    for (std::int64_t head = kv_head; item.store && head < kv_head + heads; ++head)
      write_head<typename Rows::Cache>(shape, qkv, slice, head, cache);
    const std::int64_t out_offset = slice.query_start * shape.num_heads + first_head;
    const Queries<Elem, Real> queries{qkv + slice.query_start * shape.row_stride() + first_head * head_dim,
                                      slice.context_length,
                                      item.token_begin,
                                      smaller(item.token_end, slice.query_length),
                                      static_cast<Elem*>(args.out) + out_offset * head_dim,
                                      args.lse == nullptr ? nullptr : static_cast<Real*>(args.lse) + out_offset,
                                      first_sink<Elem>(args.sinks, first_head)};
    attend<Rows>(unit, shape, workspace, tiles_of(pair), heads, queries);
    pair = next;
  }
}

/// Bytes of workspace of forward_item, for so many keys.
template <class Rows>
std::size_t forward_bytes(const AttentionShape& shape, std::int64_t max_keys) {
  const std::size_t tiles = static_cast<std::size_t>(round_up(max_keys, kTile) / kTile);
  return query_rows_bytes<Rows>(shape) +
         tiles * (Rows::key_words(shape.head_dim) + Rows::value_words(shape.head_dim)) * sizeof(typename Rows::Word);
}

}  // namespace
}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
