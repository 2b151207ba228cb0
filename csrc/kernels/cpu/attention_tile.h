// One key tile against a block of query rows: the arithmetic that training, prefill and decode share. See
// kernels/attention.h for the formula. Rows are (token, head of the group) pairs, token-major.
#pragma once
#include <cmath>

#include "kernels/attention.h"
#include "kernels/cpu/attention_simd.h"
#include "kernels/cpu/plain.h"

namespace nemo_rl::kernels {
namespace NRL_CAPABILITY {
namespace {  // nothing here may be shared between capabilities

constexpr int kTile = static_cast<int>(kKeyTile);
// Register blocks: scores hold kScoreRows x 2 vectors of sums, products with values kValueRows x kValueVecs.
#if defined(__AVX512F__)
constexpr int kScoreRows = 8, kValueRows = 6, kValueVecs = 4;
#elif defined(__AVX2__)
constexpr int kScoreRows = 6, kValueRows = 6, kValueVecs = 2;
#else
constexpr int kScoreRows = 4, kValueRows = 4, kValueVecs = 2;
#endif

template <class Elem>
struct RealOf {
  using type = float;
};
template <>
struct RealOf<double> {
  using type = double;
};

NRL_INLINE_MEMBER std::int64_t round_up(std::int64_t n, std::int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// ---------------------------------------------------------------- register blocks

/// s[r][j] = sum_h q[r][h] * k_tile[h][j] for R rows and keys j < Keys; rows of q are `stride` apart, those of s kTile.
template <int R, int Keys, class Real, class Elem>
__attribute__((noinline)) void score_rows(const Elem* k_tile, const Real* q, std::int64_t stride, std::int64_t head_dim,
                                          Real* s) {
  using Vec = typename Simd<Real>::Vec;
  constexpr int W = Simd<Real>::width, L = smaller(2, Keys / W);
  for (int lane = 0; lane < Keys; lane += L * W) {
    Vec sum[R][L] = {};
    for (std::int64_t h = 0; h < head_dim; ++h) {
      Vec k[L];
#pragma GCC unroll 2
      for (int l = 0; l < L; ++l) k[l] = load(k_tile + h * kTile + lane + l * W);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const Vec x = splat(q[r * stride + h]);
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

/// acc[r][c..] += sum_{j0<=j<j1} w[r][j] * v[j][c..] for R rows and C vectors of columns. Rows of `acc` are acc_stride
/// apart, those of w kTile, those of v head_dim. `partial` > 0: one vector of which v has so many lanes.
template <int R, int C, bool Partial, class Real, class Elem>
NRL_INLINE_MEMBER void weighted_columns(const Elem* v, std::int64_t head_dim, const Real* w, int j0, int j1, Real* acc,
                                 std::int64_t acc_stride, int partial) {
  using Vec = typename Simd<Real>::Vec;
  constexpr int W = Simd<Real>::width;
  Vec sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = load(acc + r * acc_stride + c * W);
  for (int j = j0; j < j1; ++j) {
    Vec x[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      if constexpr (Partial)
        x[c] = load_partial(v + j * head_dim, partial);
      else
        x[c] = load(v + j * head_dim + c * W);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vec weight = splat(w[r * kTile + j]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = fma(weight, x[c], sum[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) store(acc + r * acc_stride + c * W, sum[r][c]);
}

template <int R, class Real, class Elem>
__attribute__((noinline)) void weighted_rows(const Elem* v, std::int64_t head_dim, const Real* w, int j0, int j1,
                                             Real* acc, std::int64_t acc_stride) {
  constexpr int W = Simd<Real>::width;
  std::int64_t c = 0;
  for (; c + kValueVecs * W <= head_dim; c += kValueVecs * W)
    weighted_columns<R, kValueVecs, false>(v + c, head_dim, w, j0, j1, acc + c, acc_stride, 0);
  for (; c + W <= head_dim; c += W) weighted_columns<R, 1, false>(v + c, head_dim, w, j0, j1, acc + c, acc_stride, 0);
  if (c < head_dim)
    weighted_columns<R, 1, true>(v + c, head_dim, w, j0, j1, acc + c, acc_stride, static_cast<int>(head_dim - c));
}

/// to[h] = factor * from[h], H columns; `from` may be read up to whole vectors.
template <class Real, class Elem>
NRL_INLINE_MEMBER void write_row(const Real* from, std::int64_t head_dim, Real factor, Elem* to) {
  constexpr int W = Simd<Real>::width;
  const auto f = splat(factor);
  std::int64_t h = 0;
  for (; h + W <= head_dim; h += W) store(to + h, load(from + h) * f);
  if (h < head_dim) store_partial(to + h, load(from + h) * f, static_cast<int>(head_dim - h));
}

// ---------------------------------------------------------------- query rows of one block

/// Rows of one query block and their running state, in workspace memory.
template <class Real>
struct QueryRows {
  static constexpr int W = Simd<Real>::width;
  std::int64_t head_dim, group, tokens, rows, acc_stride;
  std::int64_t position;  ///< absolute position of the first token
  Real* q;                ///< [rows][acc_stride] scaled queries, zeros behind H
  Real* scores;           ///< [rows][kTile]
  Real* acc;              ///< [rows][acc_stride]
  Real* max;              ///< [rows]
  Real* sum;              ///< [rows][W], lane-wise

  /// For blocks of at most `most` tokens.
  static std::size_t bytes(const AttentionShape& shape, std::int64_t most) {
    const std::int64_t rows = most * shape.group();
    const std::int64_t stride = round_up(shape.head_dim, kNativeBytes / 4);
    return static_cast<std::size_t>(rows * (2 * stride + kTile + W) * sizeof(Real) + round_up(rows * sizeof(Real), 64));
  }

  /// In workspace that may hold them already.
  QueryRows(const AttentionShape& shape, std::byte* workspace, std::int64_t most) : head_dim(shape.head_dim), group(shape.group()) {
    acc_stride = round_up(head_dim, kNativeBytes / 4);
    q = reinterpret_cast<Real*>(workspace);
    acc = q + most * group * acc_stride;
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
  template <class Elem>
  void begin(const Elem* first, std::int64_t token_stride, Real scale) {
    copy_rows(first, token_stride, scale, q);
    fill(acc, rows * acc_stride, Real(0));
    fill(sum, rows * W, Real(0));
    fill(max, rows, -static_cast<Real>(__builtin_inf()));
  }

  /// to[r][h] = scale * row r, zeros behind H.
  template <class Elem>
  void copy_rows(const Elem* first, std::int64_t token_stride, Real scale, Real* to) const {
    const auto factor = splat(scale);
    for (std::int64_t token = 0; token < tokens; ++token) {
      const Elem* row = first + token * token_stride;
      for (std::int64_t i = 0; i < group; ++i, row += head_dim, to += acc_stride) {
        std::int64_t h = 0;
        for (; h + W <= head_dim; h += W) store(to + h, load(row + h) * factor);
        if (h < head_dim) store(to + h, load_partial(row + h, static_cast<int>(head_dim - h)) * factor);
      }
    }
  }

  /// Keys of tile `t` that a token of this block may see, 0..kTile.
  int visible(std::int64_t token, std::int64_t t) const {
    return static_cast<int>(clamped(position + token + 1 - t * kTile, 0, kTile));
  }
  std::int64_t tiles() const { return (position + tokens - 1) / kTile + 1; }
  /// The first token that sees key `key` of tile t.
  std::int64_t first_token(std::int64_t t, std::int64_t key) const {
    return clamped(t * kTile + key - position, 0, tokens);
  }

  /// to[r][j] = x[r] . (column j of the transposed tile) for the keys that the rows may see, and some more.
  template <class Elem>
  void score(std::int64_t t, const Elem* tile, const Real* x, Real* to) const {
    const std::int64_t begin = first_token(t, 0) * group, second_half = first_token(t, kTile / 2) * group;
    score_range<kTile / 2>(tile, x, begin, second_half, to);
    score_range<kTile>(tile, x, second_half, rows, to);
  }
  template <int Keys, class Elem>
  NRL_INLINE_MEMBER void score_range(const Elem* tile, const Real* x, std::int64_t from, std::int64_t end, Real* to) const {
    for (std::int64_t r = from; r < end; r += kScoreRows)
      with_constant<kScoreRows>(static_cast<int>(std::min<std::int64_t>(kScoreRows, end - r)), [&](auto n) {
        score_rows<n(), Keys>(tile, x + r * acc_stride, acc_stride, head_dim, to + r * kTile);
      });
  }

  /// Scores of row r become weights 2^(score - max); running maximum, sum and accumulator are brought up to date.
  NRL_INLINE_MEMBER void softmax_row(std::int64_t r, int keys) {
    using Vec = typename Simd<Real>::Vec;
    constexpr int L = kTile / W;
    Real* s = scores + r * kTile;
    Vec x[L];
    for (int l = 0; l < L; ++l) x[l] = load(s + l * W);
    if (keys < kTile) {
      typename Simd<Real>::Int lane;
      for (int i = 0; i < W; ++i) lane[i] = i;
      const Vec minus_infinity = splat(-static_cast<Real>(__builtin_inf()));
      for (int l = 0; l < L; ++l) x[l] = lane + l * W < keys ? x[l] : minus_infinity;
    }
    Vec best = x[0];
    for (int l = 1; l < L; ++l) best = vmax(best, x[l]);
    const Real old_max = max[r];
    const Real new_max = larger(old_max, horizontal_max(best));
    Vec total = Vec{};
    for (int l = 0; l < L; ++l) {
      const Vec w = exp2_vec(x[l] - splat(new_max));
      store(s + l * W, w);
      total += w;
    }
    Vec running = load(sum + r * W);
    if (new_max != old_max) {  // otherwise the factor is exactly 1
      max[r] = new_max;
      const Vec factor = splat(exp2_scalar(old_max - new_max));
      running *= factor;
      Real* a = acc + r * acc_stride;
      for (std::int64_t c = 0; c < acc_stride; c += W) store(a + c, load(a + c) * factor);
    }
    store(sum + r * W, running + total);
  }

  /// Adds tile t, all rows.
  template <class Elem>
  void add_tile(std::int64_t t, const Elem* k_tile, const Elem* v_tile) {
    const std::int64_t begin = first_token(t, 0);
    score(t, k_tile, q, scores);
    for (std::int64_t token = begin, r = begin * group; token < tokens; ++token) {
      const int keys = visible(token, t);
      for (std::int64_t end = r + group; r < end; ++r) softmax_row(r, keys);
    }
    // first what all rows of a register block see, then what only its later tokens see
    for (std::int64_t r = begin * group; r < rows; r += kValueRows) {
      const std::int64_t end = std::min<std::int64_t>(rows, r + kValueRows), token = r / group;
      const int common = visible(token, t);
      add_values(v_tile, r, end, 0, common);
      for (std::int64_t i = token + 1; i * group < end && common < kTile; ++i)
        add_values(v_tile, i * group, smaller(end, (i + 1) * group), common, visible(i, t));
    }
  }

  template <class Elem>
  NRL_INLINE_MEMBER void add_values(const Elem* v_tile, std::int64_t from, std::int64_t to, int j0, int j1) {
    if (j0 >= j1) return;
    with_constant<kValueRows>(static_cast<int>(to - from), [&](auto n) {
      weighted_rows<n()>(v_tile, head_dim, scores + from * kTile, j0, j1, acc + from * acc_stride, acc_stride);
    });
  }

  /// Writes out [tokens][group*H] rows (token_stride apart) and, unless null, lse (lse_stride apart).
  template <class Elem>
  void finish(Elem* out, std::int64_t token_stride, Real* lse, std::int64_t lse_stride) const {
    for (std::int64_t token = 0, r = 0; token < tokens; ++token)
      for (std::int64_t i = 0; i < group; ++i, ++r) {
        const Real total = horizontal_sum(load(sum + r * W));
        write_row(acc + r * acc_stride, head_dim, Real(1) / total, out + token * token_stride + i * head_dim);
        if (lse != nullptr) lse[token * lse_stride + i] = Real(0.69314718055994530942) * (max[r] + std::log2(total));
      }
  }
};

// ---------------------------------------------------------------- where tiles come from

/// Tiles that were packed into workspace: keys [tile][H][kTile], values [tile][kTile][H].
template <class Real>
struct PackedTiles {
  const Real* keys;
  const Real* values;
  std::int64_t tile_size;
  const Real* key_tile(std::int64_t t, std::int64_t) const { return keys + t * tile_size; }
  const Real* value_tile(std::int64_t t, std::int64_t) const { return values + t * tile_size; }
};

/// Tiles that lie in cache blocks, of the kv heads from some first one on.
template <class Elem>
struct CachedTiles {
  const Elem* first;  ///< that head's keys in block 0
  const std::int32_t* block_table;
  std::int64_t block_size, tile_size;
  const Elem* key_tile(std::int64_t t, std::int64_t head) const { return first + block_table[t] * block_size + head * 2 * tile_size; }
  const Elem* value_tile(std::int64_t t, std::int64_t head) const { return key_tile(t, head) + tile_size; }
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
void pack_transposed(const SegmentRows<Elem>& rows, std::int64_t t, std::int64_t head_dim, Real* to) {
  constexpr int W = Simd<Real>::width;
  for (int lane = 0; lane < kTile; lane += W) {
    const Elem* row[W];
    int present = 0;
    for (; present < W && t * kTile + lane + present < rows.length; ++present)
      row[present] = rows.row(t * kTile + lane + present);
    for (std::int64_t h = 0; h < head_dim; h += W) {
      const int n = static_cast<int>(std::min<std::int64_t>(W, head_dim - h));
      typename Simd<Real>::Vec block[W] = {};
      for (int i = 0; i < present; ++i) block[i] = n == W ? load(row[i] + h) : load_partial(row[i] + h, n);
      transpose<Real>(block);
      for (int i = 0; i < n; ++i) store(to + (h + i) * kTile + lane, block[i]);
    }
  }
}

/// Copies positions [t*kTile, (t+1)*kTile) into to [kTile][H]; positions after the last one become zeros.
template <class Real, class Elem>
void pack_straight(const SegmentRows<Elem>& rows, std::int64_t t, std::int64_t head_dim, Real* to) {
  for (int i = 0; i < kTile; ++i, to += head_dim) {
    if (t * kTile + i < rows.length) {
      const Elem* row = rows.row(t * kTile + i);
      for (std::int64_t h = 0; h < head_dim; ++h) to[h] = to_real(row[h]);
    } else {
      fill(to, head_dim, Real(0));
    }
  }
}

constexpr double kLog2E = 1.44269504088896340736;

}  // namespace
}  // namespace NRL_CAPABILITY
}  // namespace nemo_rl::kernels
