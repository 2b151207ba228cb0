// Causal attention, forward: packed sequences and sequences in a blocked cache run the same tiles.
#include "kernels/cpu/attention_tile.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

/// Query tokens [begin, end) of one sequence over its tiles; `position` is that of token 0. `after`: tiles of what
/// comes next, if anything does.
template <class Elem, class Real, class Tiles>
void attend(QueryRows<Real>& block, const Tiles& tiles, const AttentionShape& shape, const Elem* queries,
            std::int64_t position, std::int64_t begin, std::int64_t end, Elem* out, Real* lse, const Tiles* after) {
  const std::int64_t most = attention_query_tokens(shape.group());
  const auto scale = static_cast<Real>(shape.scale * kLog2E);
  const std::int64_t out_stride = shape.num_heads * shape.head_dim;
  for (std::int64_t token = begin; token < end;) {
    // blocks end at multiples of `most`, so that only a block's last tile is cut by causality
    const std::int64_t next = smaller(end, round_up(position + token + 1, most) - position);
    block.begin(queries + token * shape.row_stride(), shape.row_stride(), next - token, position + token, scale);
    for (std::int64_t t = 0, count = block.tiles(); t < count; ++t) {
      if (t + 1 < count)
        tiles.prefetch(t + 1);
      else if (after != nullptr && next == end)
        after->prefetch(0);
      block.add_tile(t, tiles.key_tile(t), tiles.value_tile(t));
    }
    block.finish(out + token * out_stride, out_stride, lse == nullptr ? nullptr : lse + token * shape.num_heads,
                 shape.num_heads);
    token = next;
  }
}

template <class Elem>
void forward_item(const AttentionForwardArgs& args, const AttentionItem& item, std::byte* workspace) {
  using Real = typename RealOf<Elem>::type;
  const AttentionShape& shape = args.shape;
  const std::int64_t stride = shape.row_stride(), head_dim = shape.head_dim, first_head = item.kv_head * shape.group();
  const auto* qkv = static_cast<const Elem*>(args.qkv);
  const Elem* keys = qkv + (shape.num_heads + item.kv_head) * head_dim;
  const Elem* values = keys + shape.num_kv_heads * head_dim;

  QueryRows<Real> block(shape, workspace);
  auto* key_tiles = reinterpret_cast<Real*>(workspace + round_up(QueryRows<Real>::bytes(shape), 64));
  const std::int64_t tile_size = head_dim * kTile;
  std::int64_t most_keys = 0;
  for (auto i = item.sequence_begin; i < item.sequence_end; ++i)
    most_keys =
        larger(most_keys, args.sequences[i].prefix_length + smaller(args.sequences[i].length, item.token_end));
  Real* value_tiles = key_tiles + round_up(most_keys, kTile) * head_dim;

  std::int64_t packed = 0;  // whole tiles of the common prefix that are in place already
  for (auto i = item.sequence_begin; i < item.sequence_end; ++i) {
    const AttentionSequence& sequence = args.sequences[i];
    const std::int64_t end = smaller(sequence.length, item.token_end), total = sequence.prefix_length + end;
    const SegmentRows<Elem> key_rows{keys + sequence.prefix_start * stride, keys + sequence.start * stride,
                                     sequence.prefix_length, total, stride};
    const SegmentRows<Elem> value_rows{values + sequence.prefix_start * stride, values + sequence.start * stride,
                                       sequence.prefix_length, total, stride};
    for (std::int64_t t = packed; t * kTile < total; ++t) {
      pack_transposed(key_rows, t, head_dim, key_tiles + t * tile_size);
      pack_straight(value_rows, t, head_dim, value_tiles + t * tile_size);
    }
    packed = sequence.prefix_length / kTile;
    const std::int64_t out_offset = sequence.start * shape.num_heads + first_head;
    const PackedTiles<Real> tiles{key_tiles, value_tiles, tile_size};
    attend(block, tiles, shape, qkv + sequence.start * stride + first_head * head_dim, sequence.prefix_length,
           item.token_begin, end, static_cast<Elem*>(args.out) + out_offset * head_dim,
           args.lse == nullptr ? nullptr : static_cast<Real*>(args.lse) + out_offset,
           static_cast<const PackedTiles<Real>*>(nullptr));
  }
}

template <class Elem>
void paged_item(const PagedAttentionArgs& args, const PagedItem& item, std::byte* workspace) {
  using Real = typename RealOf<Elem>::type;
  const AttentionShape& shape = args.shape;
  const std::int64_t kv_heads = shape.num_kv_heads, head_dim = shape.head_dim, tile_size = head_dim * kTile;
  const auto tiles_of = [&](std::int64_t pair) {
    return CachedTiles<Elem>{static_cast<const Elem*>(args.keys),
                             static_cast<const Elem*>(args.values),
                             args.slices[pair / kv_heads].block_table,
                             kv_heads * tile_size,
                             pair % kv_heads * tile_size,
                             tile_size * static_cast<std::int64_t>(sizeof(Elem))};
  };
  QueryRows<Real> block(shape, workspace);
  for (std::int64_t pair = item.pair_begin; pair < item.pair_end; ++pair) {
    const PagedSlice& slice = args.slices[pair / kv_heads];
    const std::int64_t first_head = pair % kv_heads * shape.group();
    const auto tiles = tiles_of(pair);
    const bool more = pair + 1 < item.pair_end && args.slices[(pair + 1) / kv_heads].query_length > 0;
    const auto after = more ? tiles_of(pair + 1) : tiles;
    attend(block, tiles, shape,
           static_cast<const Elem*>(args.qkv) + slice.query_start * shape.row_stride() + first_head * head_dim,
           slice.context_length, item.token_begin, smaller(item.token_end, slice.query_length),
           static_cast<Elem*>(args.out) + (slice.query_start * shape.num_heads + first_head) * head_dim,
           static_cast<Real*>(nullptr), more ? &after : nullptr);
  }
}

}  // namespace

std::size_t attention_forward_workspace(const AttentionShape& shape, std::int64_t max_keys) {
  const bool wide = shape.type == ElementType::float64;
  const std::size_t rows = wide ? QueryRows<double>::bytes(shape) : QueryRows<float>::bytes(shape);
  return round_up(rows, 64) + 2 * round_up(max_keys, kTile) * shape.head_dim * (wide ? 8 : 4);
}

void attention_forward_item(const AttentionForwardArgs& args, const AttentionItem& item, std::byte* workspace) {
  switch (args.shape.type) {
    case ElementType::float32:
      return forward_item<float>(args, item, workspace);
    case ElementType::bfloat16:
      return forward_item<std::uint16_t>(args, item, workspace);
    case ElementType::float64:
      return forward_item<double>(args, item, workspace);
  }
}

std::size_t attention_paged_workspace(const AttentionShape& shape) {
  return shape.type == ElementType::float64 ? QueryRows<double>::bytes(shape) : QueryRows<float>::bytes(shape);
}

void attention_paged_item(const PagedAttentionArgs& args, const PagedItem& item, std::byte* workspace) {
  switch (args.shape.type) {
    case ElementType::float32:
      return paged_item<float>(args, item, workspace);
    case ElementType::bfloat16:
      return paged_item<std::uint16_t>(args, item, workspace);
    case ElementType::float64:
      return paged_item<double>(args, item, workspace);
  }
}

}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
