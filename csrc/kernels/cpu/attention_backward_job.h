// Causal attention, backward, on packed sequences with shared prefixes. One job is one thread's: it goes over query
// blocks in order and over each block's key tiles in order, so every sum has one order. `Block` is a block of query
// rows with its arithmetic: BackwardRows (attention_backward_rows.h), or TileBackwardRows where tiles multiply
// (kernels/tiles/attention_backward_tiles.cpp).
#pragma once
#include "kernels/cpu/attention_tile.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

/// One job of one kv head.
template <class Block, class Grad>
struct Job {
  using Elem = typename Block::Elem;
  using Real = typename Block::Real;
  using Keys = typename Block::Keys;
  typename Block::Unit unit;
  const AttentionBackwardArgs& args;
  const AttentionShape& shape;
  std::int64_t kv_head, head_dim, stride;
  Block block;
  const Elem *qkv, *keys, *values;

  Job(const AttentionBackwardArgs& args, std::int64_t kv_head, std::byte* workspace)
      : args(args),
        shape(args.shape),
        kv_head(kv_head),
        head_dim(shape.head_dim),
        stride(shape.row_stride()),
        block(unit, shape, workspace) {
    qkv = static_cast<const Elem*>(args.qkv);
    keys = qkv + (shape.num_heads + kv_head) * head_dim;
    values = keys + shape.num_kv_heads * head_dim;
  }

  SegmentRows<Elem> rows_of(const AttentionSequence& s, const Elem* base, std::int64_t end) const {
    return {base + s.prefix_start * stride, base + s.start * stride, s.prefix_length, end, stride};
  }

  /// Own query tokens [begin, end): tiles before `shared` lie in `prefix`, the others in `own`.
  void queries(const AttentionSequence& s, std::int64_t begin, std::int64_t end, const Keys& prefix,
               std::int64_t shared, const Keys& own) {
    const std::int64_t most = attention_query_tokens(shape.group()), out_stride = shape.num_heads * head_dim;
    const std::int64_t first_head = kv_head * shape.group();
    for (std::int64_t token = begin; token < end;) {
      const std::int64_t position = s.prefix_length + token, row = s.start + token;
      const std::int64_t next = std::min(end, round_up(position + 1, most) - s.prefix_length);
      block.begin_backward(shape, qkv + row * stride + first_head * head_dim,
                           static_cast<const Elem*>(args.out) + row * out_stride + first_head * head_dim,
                           static_cast<const Grad*>(args.d_out) + row * out_stride + first_head * head_dim,
                           static_cast<const Real*>(args.lse) + row * shape.num_heads + first_head, next - token,
                           position);
      for (std::int64_t t = block.first_tile(); t < block.tiles(); ++t)
        block.add_tile_backward(t, t < shared ? prefix : own, t < shared ? t : t - shared);
      Grad* d_queries = static_cast<Grad*>(args.d_qkv) + row * stride + first_head * head_dim;
      for (std::int64_t i = 0, r = 0; i < block.tokens; ++i)
        for (std::int64_t head = 0; head < block.group; ++head, ++r)
          write_row(block.acc + r * block.acc_stride, head_dim, static_cast<Real>(shape.scale),
                    d_queries + i * stride + head * head_dim);
      token = next;
    }
  }

  /// d_qkv of `count` key rows from packed row `row` on; their sums begin at slot position `from` of `tiles`.
  void write_keys(const Keys& tiles, std::int64_t from, std::int64_t count, std::int64_t row) {
    Grad* d_keys = static_cast<Grad*>(args.d_qkv) + (shape.num_heads + kv_head) * head_dim;
    for (std::int64_t i = 0; i < count; ++i) {
      Grad* to = d_keys + (row + i) * stride;
      write_row(tiles.d_keys + (from + i) * block.acc_stride, head_dim, Block::key_factor(shape), to);
      write_row(tiles.d_values + (from + i) * block.acc_stride, head_dim, Real(1), to + shape.num_kv_heads * head_dim);
    }
  }

  void sharer(const AttentionSequence& s, const Keys& prefix, std::byte* memory) {
    const std::int64_t total = s.prefix_length + s.length, shared = s.prefix_length / kTile, first = shared * kTile;
    Keys own(memory, total - first, head_dim, block.acc_stride);
    for (std::int64_t t = shared; t * kTile < total; ++t)
      own.pack(t - shared, t, rows_of(s, keys, total), rows_of(s, values, total), head_dim);
    queries(s, 0, s.length, prefix, shared, own);
    // the tile where the prefix ends holds some of its rows
    own.add_first_rows(s.prefix_length - first, prefix, shared);
    own.turn_back();
    write_keys(own, s.prefix_length - first, s.length, s.start);
  }

  void run(const AttentionBackwardJob& job, std::byte* memory) {
    const AttentionSequence& owner = args.sequences[job.owner];
    Keys tiles(memory, job.key_end, head_dim, block.acc_stride);
    std::byte* more = memory + Keys::bytes(job.key_end, head_dim, block.acc_stride);
    for (std::int64_t t = 0; t * kTile < job.key_end; ++t)
      tiles.pack(t, t, rows_of(owner, keys, job.key_end), rows_of(owner, values, job.key_end), head_dim);
    queries(owner, job.token_begin, job.token_end, tiles, 0, tiles);
    for (auto i = job.sharer_begin; i < job.sharer_end; ++i) sharer(args.sequences[args.sharers[i]], tiles, more);
    tiles.turn_back();
    if (job.partial < 0) return write_keys(tiles, 0, owner.length, owner.start);
    Real* to = static_cast<Real*>(args.partials) + job.partial + kv_head * 2 * job.key_end * head_dim;
    for (const Real* from : {tiles.d_keys, tiles.d_values})
      for (std::int64_t i = 0; i < job.key_end; ++i, to += head_dim) copy(from + i * block.acc_stride, head_dim, to);
  }
};

template <class Block, class Grad>
void reduce(const AttentionBackwardArgs& args, const AttentionBackwardJob* jobs, std::int64_t count,
            std::int64_t kv_head, std::int64_t key_begin, std::int64_t key_end) {
  using Real = typename Block::Real;
  const AttentionShape& shape = args.shape;
  const std::int64_t head_dim = shape.head_dim;
  Real sum[kMostHeadDim];
  for (std::int64_t key = key_begin; key < key_end; ++key) {
    Grad* to = static_cast<Grad*>(args.d_qkv) + (args.sequences[jobs->owner].start + key) * shape.row_stride() +
               (shape.num_heads + kv_head) * head_dim;
    for (int part = 0; part < 2; ++part, to += shape.num_kv_heads * head_dim) {
      fill(sum, head_dim, Real(0));
      for (std::int64_t j = 0; j < count; ++j) {
        if (key >= jobs[j].key_end) continue;
        const Real* from = static_cast<const Real*>(args.partials) + jobs[j].partial +
                           ((kv_head * 2 + part) * jobs[j].key_end + key) * head_dim;
        for (std::int64_t h = 0; h < head_dim; ++h) sum[h] += from[h];
      }
      write_row(sum, head_dim, part == 0 ? Block::key_factor(shape) : Real(1), to);
    }
  }
}

/// Bytes of workspace of a job: the block of query rows, then the keys.
template <class Block>
std::size_t backward_bytes(const AttentionShape& shape, std::int64_t owner_keys, std::int64_t sharer_keys) {
  using Keys = typename Block::Keys;
  const std::int64_t stride = Block::stride(shape.head_dim);
  return Block::bytes(shape) + Keys::bytes(owner_keys, shape.head_dim, stride) +
         Keys::bytes(sharer_keys, shape.head_dim, stride);
}

/// Calls f(value of the gradients' storage type).
template <class Elem, class F>
void with_gradient(const AttentionBackwardArgs& args, const F& f) {
  if (args.grad_type == args.shape.type) return f(Elem{});
  f(accumulate_t<Elem>{});
}

}  // namespace
}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
