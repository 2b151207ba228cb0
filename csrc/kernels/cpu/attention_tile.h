// One key tile against a block of query rows: the arithmetic that training, prefill and decode share. See
// kernels/attention.h for the formula. Rows are (token, head of the group) pairs, token-major.
#pragma once
#include <cmath>

#include "kernels/attention.h"
#include "kernels/cpu/attention_terms.h"
#include "kernels/cpu/kv_cache_write.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

constexpr int kTile = static_cast<int>(kKeyTile);
constexpr double kLog2E = 1.44269504088896340736;
// Register blocks: scores hold kScoreRows x 2 vectors of sums, products with values kValueRows x kValueVecs.
#if defined(__AVX512F__)
constexpr int kScoreRows = 8, kValueRows = 6, kValueVecs = 4;
#elif defined(__AVX2__)
constexpr int kScoreRows = 6, kValueRows = 6, kValueVecs = 2;
#else
constexpr int kScoreRows = 4, kValueRows = 4, kValueVecs = 2;
#endif

NRL_INLINE_MEMBER std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// ---------------------------------------------------------------- register blocks

/// s[r][j] = sum_h q[r][h] * keys[h][j] for R rows and keys j < Keys, h over `words`; rows of q are `stride` apart,
/// those of s kTile.
template <int R, int Keys, class Rows, class Word, class Real>
__attribute__((noinline)) void score_rows(Rows keys, const Word* q, std::int64_t stride, std::int64_t words, Real* s) {
  using Vec = Register<Real>;
  constexpr int W = kRegisterLanes<Real>, L = smaller(2, Keys / W);
  for (int lane = 0; lane < Keys; lane += L * W) {
    Vec sum[R][L] = {};
    for (std::int64_t h = 0; h < words; ++h) {
      typename Rows::Vec k[L];
      keys.words(h, lane, k);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const auto x = splat(q[r * stride + h]);
#pragma GCC unroll 2
        for (int l = 0; l < L; ++l) sum[r][l] = fma(x, k[l], sum[r][l]);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int l = 0; l < L; ++l) store(s + r * kTile + lane + l * W, sum[r][l]);
  }
}

/// acc[r][0..] += sum_{j0<=j<j1} w[r][j] * values[j][0..] for R rows and C vectors of columns. Rows of `acc` are
/// acc_stride apart, those of w kTile words. Of pairs, j0 is even; the partner of an odd j1's last key is not
/// multiplied. Partial: one vector, of which values has `lanes` lanes.
template <int R, int C, bool Partial, class Rows, class Word, class Real>
NRL_INLINE_MEMBER void weighted_columns(Rows values, const Word* w, int j0, int j1, Real* acc, std::int64_t acc_stride,
                                        int lanes) {
  using Vec = Register<Real>;
  constexpr int W = kRegisterLanes<Real>, P = terms_in<Word>;
  Vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = load(acc + r * acc_stride + c * W);
  const auto add = [&](int word, auto whole) __attribute__((always_inline)) {
    typename Rows::Vec x[C];
    if constexpr (Partial) x[0] = values.partial(word, 0, lanes);
    else values.words(word, 0, x);
    if constexpr (P == 2)
      if constexpr (!whole())
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) x[c] &= 0xffffu;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const auto weight = splat(w[r * kTile + word]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = fma(weight, x[c], sum[r][c]);
    }
  };
  for (int word = j0 / P; word < j1 / P; ++word) add(word, std::true_type{});
  if constexpr (P == 2)
    if (j1 % 2 != 0) add(j1 / 2, std::false_type{});
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(acc + r * acc_stride + c * W, sum[r][c]);
}

template <int R, class Rows, class Word, class Real>
__attribute__((noinline)) void weighted_rows(Rows values, std::int64_t head_dim, const Word* w, int j0, int j1,
                                             Real* acc, std::int64_t acc_stride) {
  constexpr int W = kRegisterLanes<Real>;
  std::int64_t c = 0;
  for (; c + kValueVecs * W <= head_dim; c += kValueVecs * W)
    weighted_columns<R, kValueVecs, false>(values.from(c), w, j0, j1, acc + c, acc_stride, 0);
  for (; c + W <= head_dim; c += W) weighted_columns<R, 1, false>(values.from(c), w, j0, j1, acc + c, acc_stride, 0);
  if (c < head_dim)
    weighted_columns<R, 1, true>(values.from(c), w, j0, j1, acc + c, acc_stride, static_cast<int>(head_dim - c));
}

/// to[h] = factor * from[h], H columns; `from` may be read up to whole vectors.
template <class Real, class Elem>
NRL_INLINE_MEMBER void write_row(const Real* from, std::int64_t head_dim, Real factor, Elem* to) {
  constexpr int W = kRegisterLanes<Real>;
  const auto f = splat(factor);
  std::int64_t h = 0;
  for (; h + W <= head_dim; h += W) store(to + h, load(from + h) * f);
  if (h < head_dim) store(to + h, load(from + h) * f, static_cast<int>(head_dim - h));
}

// ---------------------------------------------------------------- query rows of one block

/// The state of rows that have seen their head's sink and no key: sums have `lanes` lanes a row.
template <class Elem, class Real>
void begin_with_sinks(const Elem* sinks, std::int64_t rows, std::int64_t group, Real* max, Real* sum, int lanes) {
  for (std::int64_t r = 0; r < rows; ++r) {
    max[r] = static_cast<Real>(sinks[r % group]) * static_cast<Real>(kLog2E);
    sum[r * lanes] = Real(1);
  }
}

/// Rows of one query block and their running state, in workspace memory. Pairs hold the queries as they are, and their
/// scores are scaled; numbers are scaled before they are multiplied.
template <class Element>
struct QueryRows {
  using Elem = Element;
  using Real = accumulate_t<Elem>;
  using Word = AttentionWord<Elem>;
  using Cache = RowCache<Elem>;  ///< how blocks of the cache are laid out
  struct Unit {};                ///< what multiplies: of vectors there is nothing to hold
  static Unit unit_of(std::int64_t) { return {}; }
  static constexpr int W = kRegisterLanes<Real>;
  static constexpr bool kPairs = Terms<Elem>::kPerWord == 2;
  std::int64_t head_dim, group, window, tokens, rows, acc_stride;
  std::int64_t position;  ///< absolute position of the first token
  Real score_scale;       ///< natural scale * log2(e)
  Real softcap;           ///< softcap * log2(e); 0: none
  Word* q;                ///< [rows][acc_stride] queries, zeros behind H
  Real* scores;           ///< [rows][kTile]; as weights, words of so many rows
  Real* acc;              ///< [rows][acc_stride]
  Real* max;              ///< [rows]
  Real* sum;              ///< [rows][W], lane-wise

  /// Words of a packed tile of keys or values, and how they come there.
  static std::int64_t key_words(std::int64_t head_dim) { return head_dim * kTile / Terms<Elem>::kPerWord; }
  static std::int64_t value_words(std::int64_t head_dim) { return key_words(head_dim); }
  template <class Rows>
  static void pack_keys(const Rows& rows, std::int64_t t, std::int64_t head_dim, Word* to) {
    pack_transposed(rows, t, head_dim, to);
  }
  template <class Rows>
  static void pack_values(const Rows& rows, std::int64_t t, std::int64_t head_dim, Word* to) {
    pack_straight(rows, t, head_dim, to);
  }

  /// For blocks of at most `most` tokens.
  static std::size_t bytes(const AttentionShape& shape, std::int64_t most) {
    const std::int64_t rows = most * shape.group();
    const std::int64_t stride = round_up(shape.head_dim, kRegisterBytes / 4);
    return static_cast<std::size_t>(rows * (2 * stride + kTile + W) * sizeof(Real) + round_up(rows * sizeof(Real), 64));
  }

  /// In workspace that may hold them already.
  QueryRows(Unit&, const AttentionShape& shape, std::byte* workspace, std::int64_t most)
      : head_dim(shape.head_dim), group(shape.group()), window(shape.window) {
    acc_stride = round_up(head_dim, kRegisterBytes / 4);
    score_scale = static_cast<Real>(shape.scale * kLog2E);
    softcap = static_cast<Real>(shape.softcap * kLog2E);
    q = reinterpret_cast<Word*>(workspace);
    acc = reinterpret_cast<Real*>(workspace) + most * group * acc_stride;
    scores = acc + most * group * acc_stride;
    sum = scores + most * group * kTile;
    max = sum + most * group * W;
  }

  /// Which tokens these are.
  void place(std::int64_t tokens_, std::int64_t position_) {
    tokens = tokens_;
    rows = tokens * group;
    position = position_;
  }

  /// Loads their queries: `first` points to the first token's first head of the group; tokens are token_stride apart.
  /// `sinks`: of the heads of the group; nullptr: none.
  void begin(const Elem* first, std::int64_t token_stride, const Elem* sinks) {
    if constexpr (kPairs) copy_pairs(first, token_stride);
    else copy_rows(first, token_stride, score_scale, q);
    fill(acc, rows * acc_stride, Real(0));
    fill(sum, rows * W, Real(0));
    fill(max, rows, -static_cast<Real>(__builtin_inf()));
    if (sinks != nullptr) begin_with_sinks(sinks, rows, group, max, sum, W);
  }

  /// q as it is. Whole vectors: behind a row of queries lie at least as many of its keys.
  void copy_pairs(const Elem* first, std::int64_t token_stride) {
    auto* to = reinterpret_cast<Elem*>(q);
    for (std::int64_t token = 0; token < tokens; ++token, first += token_stride)
      for (std::int64_t i = 0; i < group; ++i, to += 2 * acc_stride)
        for (std::int64_t h = 0; h < head_dim; h += W) move_vector(first + i * head_dim + h, to + h);
  }

  /// to[r][h] = scale * row r, zeros behind H.
  template <class From>
  void copy_rows(const From* first, std::int64_t token_stride, Real scale, Real* to) const {
    const auto factor = splat(scale);
    for (std::int64_t token = 0; token < tokens; ++token) {
      const From* row = first + token * token_stride;
      for (std::int64_t i = 0; i < group; ++i, row += head_dim, to += acc_stride) {
        std::int64_t h = 0;
        for (; h + W <= head_dim; h += W) store(to + h, load(row + h) * factor);
        if (h < head_dim) store(to + h, load(row + h, static_cast<int>(head_dim - h)) * factor);
      }
    }
  }

  /// Keys of tile `t` that a token of this block may see, 0..kTile.
  int visible(std::int64_t token, std::int64_t t) const {
    return static_cast<int>(clamped(position + token + 1 - t * kTile, 0, kTile));
  }
  /// Keys at the beginning of tile `t` that lie before the token's window.
  int hidden(std::int64_t token, std::int64_t t) const {
    return window == 0 ? 0 : static_cast<int>(clamped(position + token + 1 - window - t * kTile, 0, kTile));
  }
  /// Tiles [first_tile(), tiles()) hold the keys that some token sees.
  std::int64_t first_tile() const { return window == 0 ? 0 : larger<std::int64_t>(0, position + 1 - window) / kTile; }
  std::int64_t tiles() const { return (position + tokens - 1) / kTile + 1; }
  /// The first token that sees key `key` of tile t.
  std::int64_t first_token(std::int64_t t, std::int64_t key) const {
    return clamped(t * kTile + key - position, 0, tokens);
  }

  /// to[r][j] = x[r] . (column j of the transposed tile) for the keys that the rows may see, and some more.
  template <class Rows>
  void score(std::int64_t t, const Rows& tile, const Word* x, Real* to) const {
    const std::int64_t begin = first_token(t, 0) * group, second_half = first_token(t, kTile / 2) * group;
    score_range<kTile / 2>(tile, x, begin, second_half, to);
    score_range<kTile>(tile, x, second_half, rows, to);
  }
  template <int Keys, class Rows>
  NRL_INLINE_MEMBER void score_range(const Rows& tile, const Word* x, std::int64_t from, std::int64_t end,
                                     Real* to) const {
    for (std::int64_t r = from; r < end; r += kScoreRows)
      with_constant<kScoreRows>(static_cast<int>(std::min<std::int64_t>(kScoreRows, end - r)), [&](auto n) {
        score_rows<n(), Keys>(tile, x + r * acc_stride, acc_stride, head_dim / Terms<Elem>::kPerWord, to + r * kTile);
      });
  }

  NRL_INLINE_MEMBER Register<Real> scaled(Register<Real> score) const {
    if constexpr (kPairs) return score * splat(score_scale);
    else return score;
  }

  /// Scores of row r, which sees keys [before, keys) of the tile, become weights 2^(score - max); running maximum, sum
  /// and accumulator are brought up to date.
  NRL_INLINE_MEMBER void softmax_row(std::int64_t r, int before, int keys) {
    using Vec = Register<Real>;
    constexpr int L = kTile / W;
    Real* s = scores + r * kTile;
    if (before == kTile) return fill(s, kTile, Real(0));
    Vec x[L];
    for (int l = 0; l < L; ++l) x[l] = scaled(load(s + l * W));
    if (softcap != 0)
      for (int l = 0; l < L; ++l) x[l] = tanh_of(x[l] * splat(Real(1) / softcap)) * splat(softcap);
    if (keys < kTile || before > 0) {
      RegisterBits<Real> lane;
      for (int i = 0; i < W; ++i) lane[i] = i;
      const Vec minus_infinity = splat(-static_cast<Real>(__builtin_inf()));
      for (int l = 0; l < L; ++l) x[l] = lane + l * W < keys ? x[l] : minus_infinity;
      if (before > 0)
        for (int l = 0; l < L; ++l) x[l] = lane + l * W < before ? minus_infinity : x[l];
    }
    Vec best = x[0];
    for (int l = 1; l < L; ++l) best = max_of(best, x[l]);
    const Real old_max = max[r];
    const Real new_max = larger(old_max, largest_of(best));
    Vec total = Vec{};
    for (int l = 0; l < L; ++l) {
      const Vec w = exp2_of(x[l] - splat(new_max));
      if constexpr (kPairs) store_rounded(reinterpret_cast<Word*>(s) + l * W / 2, w);
      else store(s + l * W, w);
      total += w;
    }
    Vec running = load(sum + r * W);
    if (new_max != old_max) {  // otherwise the factor is exactly 1
      max[r] = new_max;
      const Vec factor = splat(exp2_of(old_max - new_max));
      running *= factor;
      Real* a = acc + r * acc_stride;
      for (std::int64_t c = 0; c < acc_stride; c += W) store(a + c, load(a + c) * factor);
    }
    store(sum + r * W, running + total);
  }

  /// Adds tile t, all rows.
  template <class Rows>
  void add_tile(std::int64_t t, const Rows& k_tile, const Rows& v_tile) {
    const std::int64_t begin = first_token(t, 0);
    score(t, k_tile, q, scores);
    for (std::int64_t token = begin, r = begin * group; token < tokens; ++token) {
      const int before = hidden(token, t), keys = visible(token, t);
      for (std::int64_t end = r + group; r < end; ++r) softmax_row(r, before, keys);
    }
    // first what all rows of a register block see, then what only its later tokens see
    for (std::int64_t r = begin * group; r < rows; r += kValueRows) {
      const std::int64_t end = std::min<std::int64_t>(rows, r + kValueRows), token = r / group;
      const int seen = visible(token, t), common = seen / Terms<Elem>::kPerWord * Terms<Elem>::kPerWord;
      add_values(v_tile, r, end, 0, common);
      for (std::int64_t i = token; i * group < end && common < kTile; ++i)
        add_values(v_tile, larger(r, i * group), smaller(end, (i + 1) * group), common, visible(i, t));
    }
  }

  template <class Rows>
  NRL_INLINE_MEMBER void add_values(const Rows& v_tile, std::int64_t from, std::int64_t to, int j0, int j1) {
    if (j0 >= j1) return;
    with_constant<kValueRows>(static_cast<int>(to - from), [&](auto n) {
      weighted_rows<n()>(v_tile, head_dim, reinterpret_cast<const Word*>(scores) + from * kTile, j0, j1,
                         acc + from * acc_stride, acc_stride);
    });
  }

  /// Writes out [tokens][group*H] rows (token_stride apart) and, unless null, lse (lse_stride apart).
  void finish(Elem* out, std::int64_t token_stride, Real* lse, std::int64_t lse_stride) const {
    for (std::int64_t token = 0, r = 0; token < tokens; ++token)
      for (std::int64_t i = 0; i < group; ++i, ++r) {
        const Real total = sum_ascending(load(sum + r * W));
        write_row(acc + r * acc_stride, head_dim, Real(1) / total, out + token * token_stride + i * head_dim);
        if (lse != nullptr) lse[token * lse_stride + i] = Real(0.69314718055994530942) * (max[r] + std::log2(total));
      }
  }
};

// ---------------------------------------------------------------- where tiles come from

/// Tiles that were packed into workspace: keys [tile][H][kTile], values [tile][kTile][H].
template <class Word>
struct PackedTiles {
  const Word* keys;
  const Word* values;
  std::int64_t head_dim, key_words, value_words;
  WordRows<Word> key_tile(std::int64_t t, std::int64_t) const { return {keys + t * key_words, kTile}; }
  WordRows<Word> value_tile(std::int64_t t, std::int64_t) const { return {values + t * value_words, head_dim}; }
};

/// Tiles that lie in cache blocks, of the kv heads from some first one on.
template <class Elem>
struct CachedTiles {
  using Rows = typename CacheRowsOf<Elem>::type;
  const Elem* first;  ///< that head's keys in block 0
  const std::int32_t* block_table;
  std::int64_t block_size, head_dim, tile_size;
  const Elem* keys(std::int64_t t, std::int64_t head) const {
    return first + block_table[t] * block_size + head * 2 * tile_size;
  }
  Rows key_tile(std::int64_t t, std::int64_t head) const { return {keys(t, head), kTile}; }
  Rows value_tile(std::int64_t t, std::int64_t head) const { return {keys(t, head) + tile_size, head_dim}; }
};

/// The rows of one sequence's keys (or values) by absolute position: a shared prefix, then its own.
template <class Elem>
struct SegmentRows {
  const Elem* prefix;  ///< position 0, if prefix_length > 0
  const Elem* own;     ///< position prefix_length
  std::int64_t prefix_length, length, row_stride;
  const Elem* row(std::int64_t position) const {
    return position < prefix_length ? prefix + position * row_stride : own + (position - prefix_length) * row_stride;
  }
};

/// Transposes positions [t*kTile, (t+1)*kTile) into to [H][kTile]; positions after the last one become zeros.
template <class Real, class Elem>
void transpose_numbers(const SegmentRows<Elem>& rows, std::int64_t t, std::int64_t head_dim, Real* to) {
  constexpr int W = kRegisterLanes<Real>;
  for (int lane = 0; lane < kTile; lane += W) {
    const Elem* row[W];
    int present = 0;
    for (; present < W && t * kTile + lane + present < rows.length; ++present)
      row[present] = rows.row(t * kTile + lane + present);
    for (std::int64_t h = 0; h < head_dim; h += W) {
      const int n = static_cast<int>(std::min<std::int64_t>(W, head_dim - h));
      Register<Real> block[W] = {};
      for (int i = 0; i < present; ++i) block[i] = n == W ? load(row[i] + h) : load(row[i] + h, n);
      transpose(block);
      for (int i = 0; i < n; ++i) store(to + (h + i) * kTile + lane, block[i]);
    }
  }
}

/// Copies positions [t*kTile, (t+1)*kTile) into to [kTile][H]; positions after the last one become zeros.
template <class Real, class Elem>
void pack_numbers(const SegmentRows<Elem>& rows, std::int64_t t, std::int64_t head_dim, Real* to) {
  for (int i = 0; i < kTile; ++i, to += head_dim) {
    if (t * kTile + i < rows.length) {
      const Elem* row = rows.row(t * kTile + i);
      for (std::int64_t h = 0; h < head_dim; ++h) to[h] = static_cast<Real>(row[h]);
    } else {
      fill(to, head_dim, Real(0));
    }
  }
}

#if defined(__AVX512BF16__)
/// The same in pairs: to[i][h] holds positions 2i and 2i + 1.
inline void pack_joined(const SegmentRows<bfloat16>& rows, std::int64_t t, std::int64_t head_dim, std::uint32_t* to) {
  for (std::int64_t position = t * kTile; position < (t + 1) * kTile; position += 2, to += head_dim) {
    const bfloat16* first = position < rows.length ? rows.row(position) : nullptr;
    const bfloat16* second = position + 1 < rows.length ? rows.row(position + 1) : nullptr;
    for (std::int64_t h = 0; h < head_dim; ++h)
      to[h] = (first != nullptr ? first[h].bits : 0u) |
              (second != nullptr ? static_cast<std::uint32_t>(second[h].bits) << 16 : 0u);
  }
}
#endif

/// A tile of keys as scores multiply it, [H][kTile] in words.
template <class Word, class Elem>
void pack_transposed(const SegmentRows<Elem>& rows, std::int64_t t, std::int64_t head_dim, Word* to) {
  if constexpr (terms_in<Word> == 2) {  // two neighbours of a row are a word already, and words are moved like floats
    const SegmentRows<float> words{reinterpret_cast<const float*>(rows.prefix),
                                   reinterpret_cast<const float*>(rows.own), rows.prefix_length, rows.length,
                                   rows.row_stride / 2};
    transpose_numbers(words, t, head_dim / 2, reinterpret_cast<float*>(to));
  } else {
    transpose_numbers(rows, t, head_dim, to);
  }
}

/// A tile of rows as weights multiply it, [kTile][H] in words.
template <class Word, class Elem>
void pack_straight(const SegmentRows<Elem>& rows, std::int64_t t, std::int64_t head_dim, Word* to) {
  if constexpr (terms_in<Word> == 2) pack_joined(rows, t, head_dim, to);
  else pack_numbers(rows, t, head_dim, to);
}

}  // namespace
}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
