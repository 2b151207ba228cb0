// Causal attention, backward, on packed sequences with shared prefixes. One job is one thread's: it goes over query
// blocks in order and over each block's key tiles in order, so every sum has one order.
#include "kernels/cpu/attention_tile.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

// Register block of the products over query rows: kOuterKeys x kOuterVecs vectors of sums; kOuterKeys divides kTile.
#if defined(__AVX512F__)
constexpr int kOuterKeys = 8, kOuterVecs = 2;
#else
constexpr int kOuterKeys = 4, kOuterVecs = 2;
#endif

/// acc[j][c..] += sum_r w[r][j] * x[r][c..] for kOuterKeys keys and C vectors of columns; w has rows of kTile.
template <int C, class Real>
__attribute__((noinline)) void outer_columns(const Real* w, const Real* x, std::int64_t rows, std::int64_t stride,
                                             Real* acc) {
  using Vec = typename Simd<Real>::Vec;
  constexpr int W = Simd<Real>::width;
  Vec sum[kOuterKeys][C];
#pragma GCC unroll 8
  for (int j = 0; j < kOuterKeys; ++j)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[j][c] = load(acc + j * stride + c * W);
  for (std::int64_t r = 0; r < rows; ++r) {
    Vec v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v[c] = load(x + r * stride + c * W);
#pragma GCC unroll 8
    for (int j = 0; j < kOuterKeys; ++j) {
      const Vec weight = splat(w[r * kTile + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[j][c] = fma(weight, v[c], sum[j][c]);
    }
  }
#pragma GCC unroll 8
  for (int j = 0; j < kOuterKeys; ++j)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(acc + j * stride + c * W, sum[j][c]);
}

/// Tiles of one run of keys and the sums of their gradients.
template <class Real>
struct KeyTiles {
  Real *keys_t, *values_t;  ///< [tile][H][kTile]
  Real* keys;               ///< [tile][kTile][H]
  Real *d_keys, *d_values;  ///< [tile][kTile][stride]
  std::int64_t tile_size, grad_tile_size;

  static std::int64_t reals(std::int64_t keys, std::int64_t head_dim, std::int64_t stride) {
    return round_up(keys, kTile) * (3 * head_dim + 2 * stride);
  }
  KeyTiles(Real* memory, std::int64_t count, std::int64_t head_dim, std::int64_t stride)
      : tile_size(head_dim * kTile), grad_tile_size(stride * kTile) {
    const std::int64_t positions = round_up(count, kTile);
    d_keys = memory;
    d_values = d_keys + positions * stride;
    keys_t = d_values + positions * stride;
    values_t = keys_t + positions * head_dim;
    keys = values_t + positions * head_dim;
    fill(d_keys, 2 * positions * stride, Real(0));
  }
  template <class Elem>
  void pack(std::int64_t slot, std::int64_t tile, const SegmentRows<Elem>& key_rows,
            const SegmentRows<Elem>& value_rows, std::int64_t head_dim) {
    pack_transposed(key_rows, tile, head_dim, keys_t + slot * tile_size);
    pack_transposed(value_rows, tile, head_dim, values_t + slot * tile_size);
    pack_straight(key_rows, tile, head_dim, keys + slot * tile_size);
  }
};

/// A block of query rows in the backward: QueryRows' q, scores and acc (here d_q) and what else it takes.
template <class Real>
struct BackwardRows : QueryRows<Real> {
  using Base = QueryRows<Real>;
  using Vec = typename Simd<Real>::Vec;
  using Base::acc, Base::acc_stride, Base::group, Base::head_dim, Base::q, Base::rows, Base::scores, Base::W;
  Real* d_out;          ///< [rows][acc_stride], zeros behind H
  Real* d_scores;       ///< [rows][kTile]
  Real *log_sum, *dot;  ///< [rows]: log2 of the softmax's sum; d_out . out

  static std::int64_t own_reals(const AttentionShape& shape) {
    const std::int64_t rows = attention_query_tokens(shape.group()) * shape.group();
    return round_up(rows * (round_up(shape.head_dim, kNativeBytes / 4) + kTile + 2), 16);
  }
  static std::size_t rows_bytes(const AttentionShape& shape) {
    return round_up(Base::bytes(shape, attention_query_tokens(shape.group())), 64);
  }
  static std::size_t bytes(const AttentionShape& shape) {
    return rows_bytes(shape) + own_reals(shape) * sizeof(Real);
  }

  BackwardRows(const AttentionShape& shape, std::byte* workspace)
      : Base(shape, workspace, attention_query_tokens(shape.group())) {
    const std::int64_t most = attention_query_tokens(group) * group;
    d_out = reinterpret_cast<Real*>(workspace + rows_bytes(shape));
    d_scores = d_out + most * acc_stride;
    log_sum = d_scores + most * kTile;
    dot = log_sum + most;
  }

  /// Pointers are those of the block's first token and the group's first head.
  template <class Elem, class Grad>
  void begin_backward(const AttentionShape& shape, const Elem* queries, const Elem* out, const Grad* grad,
                      const Real* lse, std::int64_t tokens, std::int64_t position) {
    const auto scale = static_cast<Real>(shape.scale * kLog2E);
    const std::int64_t out_stride = shape.num_heads * head_dim;
    Base::place(tokens, position);
    Base::begin(queries, shape.row_stride(), scale);
    Base::copy_rows(grad, out_stride, Real(1), d_out);
    for (std::int64_t token = 0, r = 0; token < tokens; ++token)
      for (std::int64_t i = 0; i < group; ++i, ++r) {
        log_sum[r] = lse[token * shape.num_heads + i] * static_cast<Real>(kLog2E);
        const Elem* o = out + token * out_stride + i * head_dim;
        const Real* g = d_out + r * acc_stride;
        Vec total = Vec{};
        std::int64_t h = 0;
        for (; h + W <= head_dim; h += W) total = fma(load(g + h), load(o + h), total);
        if (h < head_dim) total = fma(load(g + h), load_partial(o + h, static_cast<int>(head_dim - h)), total);
        dot[r] = horizontal_sum(total);
      }
  }

  /// scores become P, d_scores (holding dP) become dS; keys that the row does not see get zeros in both.
  NRL_INLINE_MEMBER void weights_row(std::int64_t r, int keys) {
    typename Simd<Real>::Int lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    const Vec minus = splat(log_sum[r]), d = splat(dot[r]);
    for (int l = 0; l < kTile; l += W) {
      Real* s = scores + r * kTile + l;
      Real* ds = d_scores + r * kTile + l;
      const Vec p = exp2_vec(load(s) - minus);
      const Vec g = p * (load(ds) - d);
      store(s, lane + l < keys ? p : Vec{});
      store(ds, lane + l < keys ? g : Vec{});
    }
  }

  /// Tile t, which lies at `slot` of `tiles`.
  void add_tile_backward(std::int64_t t, const KeyTiles<Real>& tiles, std::int64_t slot) {
    const Real* keys = tiles.keys + slot * tiles.tile_size;
    Base::score(t, tiles.keys_t + slot * tiles.tile_size, q, scores);
    Base::score(t, tiles.values_t + slot * tiles.tile_size, d_out, d_scores);
    const std::int64_t begin = Base::first_token(t, 0);
    for (std::int64_t token = begin, r = begin * group; token < Base::tokens; ++token) {
      const int seen = Base::visible(token, t);
      for (std::int64_t end = r + group; r < end; ++r) weights_row(r, seen);
    }
    for (std::int64_t r = begin * group; r < rows; r += kValueRows) {
      const std::int64_t end = std::min<std::int64_t>(rows, r + kValueRows);
      with_constant<kValueRows>(static_cast<int>(end - r), [&](auto n) {
        weighted_rows<n()>(keys, head_dim, d_scores + r * kTile, 0, Base::visible((end - 1) / group, t),
                           acc + r * acc_stride, acc_stride);
      });
    }
    add_outer(t, scores, d_out, tiles.d_values + slot * tiles.grad_tile_size);
    add_outer(t, d_scores, q, tiles.d_keys + slot * tiles.grad_tile_size);
  }

  /// to[j] += sum_r w[r][j] * x[r] over the rows that see key j.
  void add_outer(std::int64_t t, const Real* w, const Real* x, Real* to) const {
    const int keys = Base::visible(Base::tokens - 1, t);
    const auto columns = [&](auto vecs, std::int64_t c) {
      for (int j = 0; j < keys; j += kOuterKeys) {
        const std::int64_t r = Base::first_token(t, j) * group;
        outer_columns<vecs()>(w + r * kTile + j, x + r * acc_stride + c, rows - r, acc_stride, to + j * acc_stride + c);
      }
    };
    std::int64_t c = 0;
    for (; c + kOuterVecs * W <= acc_stride; c += kOuterVecs * W) columns(std::integral_constant<int, kOuterVecs>{}, c);
    for (; c < acc_stride; c += W) columns(std::integral_constant<int, 1>{}, c);
  }
};

constexpr double kLn2 = 0.69314718055994530942;  // queries carry log2(e), so sums for keys do too

/// One job of one kv head.
template <class Elem, class Grad>
struct Job {
  using Real = typename RealOf<Elem>::type;
  const AttentionBackwardArgs& args;
  const AttentionShape& shape;
  std::int64_t kv_head, head_dim, stride;
  BackwardRows<Real> block;
  const Elem *qkv, *keys, *values;

  Job(const AttentionBackwardArgs& args, std::int64_t kv_head, std::byte* workspace)
      : args(args),
        shape(args.shape),
        kv_head(kv_head),
        head_dim(shape.head_dim),
        stride(shape.row_stride()),
        block(shape, workspace) {
    qkv = static_cast<const Elem*>(args.qkv);
    keys = qkv + (shape.num_heads + kv_head) * head_dim;
    values = keys + shape.num_kv_heads * head_dim;
  }

  SegmentRows<Elem> rows_of(const AttentionSequence& s, const Elem* base, std::int64_t end) const {
    return {base + s.prefix_start * stride, base + s.start * stride, s.prefix_length, end, stride};
  }

  /// Own query tokens [begin, end): tiles before `shared` lie in `prefix`, the others in `own`.
  void queries(const AttentionSequence& s, std::int64_t begin, std::int64_t end, const KeyTiles<Real>& prefix,
               std::int64_t shared, const KeyTiles<Real>& own) {
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
      for (std::int64_t t = 0; t < block.tiles(); ++t)
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
  void write_keys(const KeyTiles<Real>& tiles, std::int64_t from, std::int64_t count, std::int64_t row) {
    Grad* d_keys = static_cast<Grad*>(args.d_qkv) + (shape.num_heads + kv_head) * head_dim;
    for (std::int64_t i = 0; i < count; ++i) {
      Grad* to = d_keys + (row + i) * stride;
      write_row(tiles.d_keys + (from + i) * block.acc_stride, head_dim, static_cast<Real>(kLn2), to);
      write_row(tiles.d_values + (from + i) * block.acc_stride, head_dim, Real(1), to + shape.num_kv_heads * head_dim);
    }
  }

  void sharer(const AttentionSequence& s, const KeyTiles<Real>& prefix, Real* memory) {
    const std::int64_t total = s.prefix_length + s.length, shared = s.prefix_length / kTile, first = shared * kTile;
    KeyTiles<Real> own(memory, total - first, head_dim, block.acc_stride);
    for (std::int64_t t = shared; t * kTile < total; ++t)
      own.pack(t - shared, t, rows_of(s, keys, total), rows_of(s, values, total), head_dim);
    queries(s, 0, s.length, prefix, shared, own);
    // the tile where the prefix ends holds some of its rows
    const std::int64_t mixed = (s.prefix_length - first) * block.acc_stride, at = first * block.acc_stride;
    for (std::int64_t i = 0; i < mixed; ++i) prefix.d_keys[at + i] += own.d_keys[i];
    for (std::int64_t i = 0; i < mixed; ++i) prefix.d_values[at + i] += own.d_values[i];
    write_keys(own, s.prefix_length - first, s.length, s.start);
  }

  void run(const AttentionBackwardJob& job, Real* memory) {
    const AttentionSequence& owner = args.sequences[job.owner];
    KeyTiles<Real> tiles(memory, job.key_end, head_dim, block.acc_stride);
    Real* more = memory + KeyTiles<Real>::reals(job.key_end, head_dim, block.acc_stride);
    for (std::int64_t t = 0; t * kTile < job.key_end; ++t)
      tiles.pack(t, t, rows_of(owner, keys, job.key_end), rows_of(owner, values, job.key_end), head_dim);
    queries(owner, job.token_begin, job.token_end, tiles, 0, tiles);
    for (auto i = job.sharer_begin; i < job.sharer_end; ++i) sharer(args.sequences[args.sharers[i]], tiles, more);
    if (job.partial < 0) return write_keys(tiles, 0, owner.length, owner.start);
    Real* to = static_cast<Real*>(args.partials) + job.partial + kv_head * 2 * job.key_end * head_dim;
    for (const Real* from : {tiles.d_keys, tiles.d_values})
      for (std::int64_t i = 0; i < job.key_end; ++i, to += head_dim)
        copy(from + i * block.acc_stride, head_dim, to);
  }
};

template <class Elem, class Grad>
void reduce(const AttentionBackwardArgs& args, const AttentionBackwardJob* jobs, std::int64_t count,
            std::int64_t kv_head, std::int64_t key_begin, std::int64_t key_end) {
  using Real = typename RealOf<Elem>::type;
  const AttentionShape& shape = args.shape;
  const std::int64_t head_dim = shape.head_dim;
  Real sum[256];
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
      write_row(sum, head_dim, part == 0 ? static_cast<Real>(kLn2) : Real(1), to);
    }
  }
}

/// Calls f with values of the storage types (Elem, Grad).
template <class F>
void with_types(const AttentionBackwardArgs& args, F&& f) {
  switch (args.shape.type) {
    case ElementType::float32:
      return f(float{}, float{});
    case ElementType::float64:
      return f(double{}, double{});
    case ElementType::bfloat16:
      if (args.grad_type == ElementType::bfloat16) return f(std::uint16_t{}, std::uint16_t{});
      return f(std::uint16_t{}, float{});
  }
}

template <class Real>
std::size_t workspace_bytes(const AttentionShape& shape, std::int64_t owner_keys, std::int64_t sharer_keys) {
  const std::int64_t stride = round_up(shape.head_dim, kNativeBytes / 4);
  return round_up(BackwardRows<Real>::bytes(shape), 64) + (KeyTiles<Real>::reals(owner_keys, shape.head_dim, stride) +
                                                           KeyTiles<Real>::reals(sharer_keys, shape.head_dim, stride)) *
                                                              sizeof(Real);
}

}  // namespace

std::size_t attention_backward_workspace(const AttentionShape& shape, std::int64_t owner_keys,
                                         std::int64_t sharer_keys) {
  return shape.type == ElementType::float64 ? workspace_bytes<double>(shape, owner_keys, sharer_keys)
                                            : workspace_bytes<float>(shape, owner_keys, sharer_keys);
}

void attention_backward_job(const AttentionBackwardArgs& args, const AttentionBackwardJob& job, std::int64_t kv_head,
                            std::byte* workspace) {
  with_types(args, [&](auto elem, auto grad) {
    using Work = Job<decltype(elem), decltype(grad)>;
    using Real = typename Work::Real;
    Work(args, kv_head, workspace)
        .run(job, reinterpret_cast<Real*>(workspace + round_up(BackwardRows<Real>::bytes(args.shape), 64)));
  });
}

void attention_backward_reduce(const AttentionBackwardArgs& args, const AttentionBackwardJob* jobs, std::int64_t count,
                               std::int64_t kv_head, std::int64_t key_begin, std::int64_t key_end) {
  with_types(args, [&](auto elem, auto grad) {
    reduce<decltype(elem), decltype(grad)>(args, jobs, count, kv_head, key_begin, key_end);
  });
}

}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
