// The arithmetic of attention's backward by vectors: numbers, or pairs of bfloat16 where the processor multiplies them.
#pragma once
#include "kernels/cpu/attention_backward_job.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {

// Register block of the products over query rows: kOuterKeys x kOuterVecs vectors of sums; kOuterKeys divides kTile.
#if defined(__AVX512F__)
constexpr int kOuterKeys = 8, kOuterVecs = 2;
#else
constexpr int kOuterKeys = 4, kOuterVecs = 2;
#endif

/// acc[j][c..] += sum_r w[r][j] * x[r][c..] for kOuterKeys keys and C vectors of columns, r over `words` rows of words;
/// w has rows of kTile words.
template <int C, class Word, class Real>
__attribute__((noinline)) void outer_columns(const Word* w, const Word* x, std::int64_t words, std::int64_t stride,
                                             Real* acc) {
  using Vec = Register<Real>;
  constexpr int W = kRegisterLanes<Real>;
  Vec sum[kOuterKeys][C];
#pragma GCC unroll 8
  for (int j = 0; j < kOuterKeys; ++j)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[j][c] = load(acc + j * stride + c * W);
  for (std::int64_t r = 0; r < words; ++r) {
    WordVec<Word> v[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v[c] = load(x + r * stride + c * W);
#pragma GCC unroll 8
    for (int j = 0; j < kOuterKeys; ++j) {
      const auto weight = splat(w[r * kTile + j]);
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
template <class Elem>
struct KeyTiles {
  using Real = accumulate_t<Elem>;
  using Word = AttentionWord<Elem>;
  Word *keys_t, *values_t;  ///< [tile][H][kTile] in words
  Word* keys;               ///< [tile][kTile][H] in words
  Real *d_keys, *d_values;  ///< [tile][kTile][stride]
  std::int64_t tile_size, grad_tile_size;

  static std::size_t bytes(std::int64_t keys, std::int64_t head_dim, std::int64_t stride) {
    return round_up(keys, kTile) * (3 * head_dim / Terms<Elem>::kPerWord * sizeof(Word) + 2 * stride * sizeof(Real));
  }
  KeyTiles(std::byte* memory, std::int64_t count, std::int64_t head_dim, std::int64_t stride)
      : tile_size(head_dim * kTile / Terms<Elem>::kPerWord), grad_tile_size(stride * kTile) {
    const std::int64_t tiles = round_up(count, kTile) / kTile;
    d_keys = reinterpret_cast<Real*>(memory);
    d_values = d_keys + tiles * grad_tile_size;
    keys_t = reinterpret_cast<Word*>(d_values + tiles * grad_tile_size);
    values_t = keys_t + tiles * tile_size;
    keys = values_t + tiles * tile_size;
    fill(d_keys, 2 * tiles * grad_tile_size, Real(0));
  }
  void pack(std::int64_t slot, std::int64_t tile, const SegmentRows<Elem>& key_rows,
            const SegmentRows<Elem>& value_rows, std::int64_t head_dim) {
    pack_transposed(key_rows, tile, head_dim, keys_t + slot * tile_size);
    pack_transposed(value_rows, tile, head_dim, values_t + slot * tile_size);
    pack_straight(key_rows, tile, head_dim, keys + slot * tile_size);
  }
  /// Adds the sums of the first `count` keys to those of as many keys of `to`, from slot `slot` on.
  void add_first_rows(std::int64_t count, const KeyTiles& to, std::int64_t slot) const {
    const std::int64_t values = count * (grad_tile_size / kTile), at = slot * grad_tile_size;
    for (std::int64_t i = 0; i < values; ++i) to.d_keys[at + i] += d_keys[i];
    for (std::int64_t i = 0; i < values; ++i) to.d_values[at + i] += d_values[i];
  }
  void turn_back() {}  // the sums of a key are a row already
};

/// A block of query rows in the backward: QueryRows' q, scores and acc (here d_q) and what else it takes. Sums over
/// rows multiply what
/// `*_by_row` hold: with pairs, two rows a word; else the same numbers as q, d_out, scores and d_scores.
template <class Elem>
struct BackwardRows : QueryRows<Elem> {
  using Base = QueryRows<Elem>;
  using Keys = KeyTiles<Elem>;
  using Real = typename Base::Real;
  using Word = typename Base::Word;
  using Vec = Register<Real>;
  using Base::acc, Base::acc_stride, Base::group, Base::head_dim, Base::q, Base::rows, Base::scores, Base::softcap,
      Base::W, Base::kPairs;
  Word* d_out;                       ///< [rows][acc_stride], zeros behind H
  Real* d_scores;                    ///< [rows][kTile]; as gradients, words of so many rows
  Real *log_sum, *dot;               ///< [rows]: log2 of the softmax's sum; d_out . out
  Word *q_by_row, *d_out_by_row;     ///< [rows in words][acc_stride]
  Word *p_by_row, *d_scores_by_row;  ///< [rows in words][kTile]

  static std::int64_t most_rows(const AttentionShape& shape) {
    return attention_query_tokens(shape.group()) * shape.group();
  }
  static std::int64_t own_reals(const AttentionShape& shape) {
    const std::int64_t rows = most_rows(shape), width = round_up(shape.head_dim, kRegisterBytes / 4) + kTile;
    return round_up(rows * (width + 2) + (kPairs ? (rows + 1) / 2 * 2 * width : 0), 16);
  }
  static std::int64_t stride(std::int64_t head_dim) { return round_up(head_dim, kRegisterBytes / 4); }
  /// What makes the sum for a key its gradient: numbers of queries carry scale * log2(e), pairs nothing.
  static Real key_factor(const AttentionShape& shape) {
    constexpr double kLn2 = 0.69314718055994530942;
    return static_cast<Real>(kPairs ? shape.scale : kLn2);
  }
  static std::size_t rows_bytes(const AttentionShape& shape) {
    return round_up(Base::bytes(shape, attention_query_tokens(shape.group())), 64);
  }
  static std::size_t bytes(const AttentionShape& shape) {
    return round_up(rows_bytes(shape) + own_reals(shape) * sizeof(Real), 64);
  }

  BackwardRows(typename Base::Unit& unit, const AttentionShape& shape, std::byte* workspace)
      : Base(unit, shape, workspace, attention_query_tokens(shape.group())) {
    const std::int64_t most = most_rows(shape), pairs = (most + 1) / 2;
    d_out = reinterpret_cast<Word*>(workspace + rows_bytes(shape));
    d_scores = reinterpret_cast<Real*>(d_out + most * acc_stride);
    log_sum = d_scores + most * kTile;
    dot = log_sum + most;
    if constexpr (kPairs) {
      q_by_row = reinterpret_cast<Word*>(dot + most);
      d_out_by_row = q_by_row + pairs * acc_stride;
      p_by_row = d_out_by_row + pairs * acc_stride;
      d_scores_by_row = p_by_row + pairs * kTile;
    } else {
      q_by_row = q, d_out_by_row = d_out, p_by_row = scores, d_scores_by_row = d_scores;
    }
  }

  /// Pointers are those of the block's first token and the group's first head.
  template <class Grad>
  void begin_backward(const AttentionShape& shape, const Elem* queries, const Elem* out, const Grad* grad,
                      const Real* lse, std::int64_t tokens, std::int64_t position) {
    const std::int64_t out_stride = shape.num_heads * head_dim;
    Base::place(tokens, position);
    Base::begin(queries, shape.row_stride(), nullptr);
    if constexpr (kPairs) {
      round_rows(grad, out_stride);
      join_rows(q, q_by_row);
      join_rows(d_out, d_out_by_row);
    } else {
      Base::copy_rows(grad, out_stride, Real(1), d_out);
    }
    for (std::int64_t token = 0, r = 0; token < tokens; ++token)
      for (std::int64_t i = 0; i < group; ++i, ++r) {
        log_sum[r] = lse[token * shape.num_heads + i] * static_cast<Real>(kLog2E);
        dot[r] = dot_product(reinterpret_cast<const GradTerm*>(d_out + r * acc_stride),
                             out + token * out_stride + i * head_dim);
      }
  }
  /// What d_out's words are made of.
  using GradTerm = std::conditional_t<kPairs, Elem, Real>;

  Real dot_product(const GradTerm* g, const Elem* o) const {
    Vec total = Vec{};
    std::int64_t h = 0;
    for (; h + W <= head_dim; h += W) total = fma(load(g + h), load(o + h), total);
    if (h < head_dim) {
      const int left = static_cast<int>(head_dim - h);
      total = fma(load(g + h, left), load(o + h, left), total);
    }
    return sum_ascending(total);
  }

  /// d_out: the rows of `grad`, rounded to what the products multiply.
  template <class Grad>
  void round_rows(const Grad* grad, std::int64_t token_stride) {
    Word* to = d_out;
    for (std::int64_t token = 0; token < Base::tokens; ++token, grad += token_stride)
      for (std::int64_t i = 0; i < group; ++i, to += acc_stride) {
        const Grad* row = grad + i * head_dim;
        auto* rounded = reinterpret_cast<Elem*>(to);
        std::int64_t h = 0;
        for (; h + W <= head_dim; h += W) store(rounded + h, load(row + h));
        if (h < head_dim)
          store(rounded + h, load(row + h, static_cast<int>(head_dim - h)), static_cast<int>(head_dim - h));
      }
  }

  /// Two rows of pairs along H become one of pairs along the rows; the partner of an odd last row is zeros.
  void join_rows(const Word* from, Word* to) const {
    for (std::int64_t r = 0; r < rows; r += 2, from += 2 * acc_stride, to += acc_stride)
      for (std::int64_t h = 0; h < acc_stride; h += W) {
        const auto* first = reinterpret_cast<const Elem*>(from) + h;
        const auto joined = join(first, first + 2 * acc_stride);
        store(to + h, r + 1 < rows ? joined : joined & 0xffffu);
      }
  }

  /// scores become P, d_scores (holding dP) become dS; keys that the row does not see, those outside [before, keys),
  /// get zeros in both.
  NRL_INLINE_MEMBER void weights_row(std::int64_t r, int before, int keys) {
    RegisterBits<Real> lane;
    for (int i = 0; i < W; ++i) lane[i] = i;
    const Vec minus = splat(log_sum[r]), d = splat(dot[r]);
    for (int l = 0; l < kTile; l += W) {
      Vec x = Base::scaled(load(scores + r * kTile + l)), slope = splat(Real(1));
      if (softcap != 0) {
        const Vec t = tanh_of(x * splat(Real(1) / softcap));
        x = t * splat(softcap), slope = splat(Real(1)) - t * t;
      }
      const Vec p = exp2_of(x - minus);
      const Vec g =
          softcap != 0 ? p * (load(d_scores + r * kTile + l) - d) * slope : p * (load(d_scores + r * kTile + l) - d);
      Vec seen_p = lane + l < keys ? p : Vec{}, seen_g = lane + l < keys ? g : Vec{};
      if (before > l) seen_p = lane + l < before ? Vec{} : seen_p, seen_g = lane + l < before ? Vec{} : seen_g;
      if constexpr (kPairs) {
        store_rounded(reinterpret_cast<Word*>(d_scores + r * kTile) + l / 2, seen_g);
        put_row(p_by_row, r, l, seen_p);
        put_row(d_scores_by_row, r, l, seen_g);
      } else {
        store(scores + r * kTile + l, seen_p);
        store(d_scores + r * kTile + l, seen_g);
      }
    }
  }
  /// Row r's half of a vector of words; rows come in order.
  NRL_INLINE_MEMBER void put_row(Word* by_row, std::int64_t r, int column, Vec x) const {
    Word* to = by_row + r / 2 * kTile + column;
    store(to, r % 2 == 0 ? lower_halves(x) : load(to) | lower_halves(x) << 16);
  }

  /// Tile t, which lies at `slot` of `tiles`.
  void add_tile_backward(std::int64_t t, const KeyTiles<Elem>& tiles, std::int64_t slot) {
    const auto rows_of = [&](const Word* tile, std::int64_t stride) {
      return WordRows<Word>{tile + slot * tiles.tile_size, stride};
    };
    Base::score(t, rows_of(tiles.keys_t, kTile), q, scores);
    Base::score(t, rows_of(tiles.values_t, kTile), d_out, d_scores);
    const std::int64_t begin = Base::first_token(t, 0);
    if constexpr (kPairs) clear_partner(begin * group);
    for (std::int64_t token = begin, r = begin * group; token < Base::tokens; ++token) {
      const int before = Base::hidden(token, t), seen = Base::visible(token, t);
      for (std::int64_t end = r + group; r < end; ++r) weights_row(r, before, seen);
    }
    const auto keys = rows_of(tiles.keys, head_dim);
    for (std::int64_t r = begin * group; r < rows; r += kValueRows) {
      const std::int64_t end = std::min<std::int64_t>(rows, r + kValueRows);
      with_constant<kValueRows>(static_cast<int>(end - r), [&](auto n) {
        weighted_rows<n()>(keys, head_dim, reinterpret_cast<const Word*>(d_scores) + r * kTile, 0,
                           Base::visible((end - 1) / group, t), acc + r * acc_stride, acc_stride);
      });
    }
    add_outer(t, p_by_row, d_out_by_row, tiles.d_values + slot * tiles.grad_tile_size);
    add_outer(t, d_scores_by_row, q_by_row, tiles.d_keys + slot * tiles.grad_tile_size);
  }

  /// The row before an odd first one sees nothing of a tile.
  void clear_partner(std::int64_t first) {
    if (first % 2 == 0) return;
    fill(p_by_row + first / 2 * kTile, kTile, Word(0));
    fill(d_scores_by_row + first / 2 * kTile, kTile, Word(0));
  }

  /// to[j] += sum_r w[r][j] * x[r] over the rows that see key j; of pairs, over their partners too, whose weights are
  /// zeros.
  void add_outer(std::int64_t t, const Word* w, const Word* x, Real* to) const {
    constexpr std::int64_t P = Terms<Elem>::kPerWord;
    const int keys = Base::visible(Base::tokens - 1, t);
    const auto columns = [&](auto vecs, std::int64_t c) {
      for (int j = 0; j < keys; j += kOuterKeys) {
        const std::int64_t r = Base::first_token(t, j) * group / P, end = (rows + P - 1) / P;
        outer_columns<vecs()>(w + r * kTile + j, x + r * acc_stride + c, end - r, acc_stride, to + j * acc_stride + c);
      }
    };
    std::int64_t c = 0;
    for (; c + kOuterVecs * W <= acc_stride; c += kOuterVecs * W) columns(std::integral_constant<int, kOuterVecs>{}, c);
    for (; c < acc_stride; c += W) columns(std::integral_constant<int, 1>{}, c);
  }
};

}  // namespace
}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
