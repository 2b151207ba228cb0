// The forward product as dot products: both operands run along K in memory, so weights need no repacking (the engine
// reads the trainer's storage) and one row costs no more than its share of many. Each output has one vector
// accumulator that walks K in steps of a vector, and one fixed tree that adds its lanes.
#pragma once
#include "kernels/cpu/plain.h"
#include "kernels/cpu/simd.h"
#include "kernels/linear.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// One step along K: how T is loaded and multiplied into float or double lanes.
template <class T>
struct Dot {
  using S = simd_t<T>;
  using V = typename S::V;
  using Operand = V;
  static constexpr int kStep = S::kLanes;
  static Operand load(const T* p) { return S::load(p); }
  static Operand load(const T* p, int n) { return S::load(p, n); }
  static V mul_add(Operand a, Operand b, V c) { return S::fma(a, b, c); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bfloat16> {
  using S = F32;
  using V = __m512;
  using Operand = __m512bh;
  static constexpr int kStep = 32;
  static Operand load(const bfloat16* p) { return reinterpret_cast<Operand>(_mm512_loadu_si512(p)); }
  static Operand load(const bfloat16* p, int n) {
    return reinterpret_cast<Operand>(_mm512_maskz_loadu_epi16((1ull << n) - 1, p));
  }
  static V mul_add(Operand a, Operand b, V c) { return _mm512_dpbf16_ps(c, a, b); }
};
#endif

/// out[4 * i .. 4 * i + 3] at i * stride: the lane sums of 16 accumulators, by the same halving tree as reduce_add.
template <class S>
[[gnu::always_inline]] inline void reduce_16(const typename S::V (&acc)[16], typename S::Scalar* out, std::int64_t stride) {
#if defined(__AVX512F__)
  if constexpr (S::kLanes == 16) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i)  // lanes [0, 8) and [8, 16) of accumulators i and i + 8
      a[i] = _mm512_add_ps(_mm512_shuffle_f32x4(acc[i], acc[i + 8], 0x44), _mm512_shuffle_f32x4(acc[i], acc[i + 8], 0xee));
    for (int i = 0; i < 4; ++i)  // quarters: i, i + 8 | i + 4, i + 12
      b[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd));
    for (int i = 0; i < 2; ++i)  // pairs of lanes
      c[i] = _mm512_add_ps(_mm512_shuffle_ps(b[i], b[i + 2], 0x44), _mm512_shuffle_ps(b[i], b[i + 2], 0xee));
    const __m512 d = _mm512_add_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
    // a 128-bit part holds accumulators +0, +2, +1, +3 of 0, 8, 4, 12
    const __m512 ordered = _mm512_permute_ps(d, 0xd8);
    _mm_storeu_ps(out, _mm512_castps512_ps128(ordered));
    _mm_storeu_ps(out + stride, _mm512_extractf32x4_ps(ordered, 2));
    _mm_storeu_ps(out + 2 * stride, _mm512_extractf32x4_ps(ordered, 1));
    _mm_storeu_ps(out + 3 * stride, _mm512_extractf32x4_ps(ordered, 3));
    return;
  }
#endif
  for (int i = 0; i < 16; ++i) out[i / 4 * stride + i % 4] = reduce_add<S>(acc[i]);
}

/// Memory to ask for while sums are computed, `step` bytes further with every step along K.
struct Ahead {
  const char* at;
  std::int64_t step;
};

/// Elements of K in a part, where there are at least twice as many. Long rows go part by part, so that four rows of x stay in the
/// first level while the columns pass by; the sums wait in memory meanwhile, lane by lane: the same bits.
template <class T>
constexpr std::int64_t kPart = 2048 / sizeof(T);

/// 16 sums over steps [begin, end) of K: 4 rows of x by 4 of w (kRows = 4), or 1 row by 16 (kRows = 1, stride 4), the same
/// operations an output. kResume: they go on from `held`; kSuspend: they are put there, and are not sums yet.
template <class T, int kRows, bool kTail, bool kResume, bool kSuspend>
[[gnu::always_inline]] inline void tile(const T* const* x, const T* const* w, std::int64_t begin, std::int64_t end, std::int64_t K,
                                        Ahead ahead, typename Dot<T>::V* held, typename Dot<T>::S::Scalar* out, std::int64_t stride) {
  using D = Dot<T>;
  constexpr int kCols = 16 / kRows;
  typename D::V acc[16];
  for (int i = 0; i < 16; ++i) acc[i] = kResume ? held[i] : D::S::zero();
  for (std::int64_t k = begin; k < end; k += D::kStep) {
    if constexpr (kRows > 1) {
      __builtin_prefetch(ahead.at, 0, 2);
      ahead.at += ahead.step;
    }
    typename D::Operand b[kCols];
    for (int j = 0; j < kCols; ++j) b[j] = D::load(w[j] + k);
    for (int i = 0; i < kRows; ++i) {
      const auto a = D::load(x[i] + k);
      for (int j = 0; j < kCols; ++j) acc[i * kCols + j] = D::mul_add(a, b[j], acc[i * kCols + j]);
    }
  }
  if constexpr (kSuspend) {
    for (int i = 0; i < 16; ++i) held[i] = acc[i];
    return;
  }
  if constexpr (kTail) {
    const int rest = static_cast<int>(K - end);
    for (int i = 0; i < kRows; ++i) {
      const auto a = D::load(x[i] + end, rest);
      for (int j = 0; j < kCols; ++j) acc[i * kCols + j] = D::mul_add(a, D::load(w[j] + end, rest), acc[i * kCols + j]);
    }
  }
  reduce_16<typename D::S>(acc, out, stride);
}

/// A tile's rows of w, as addresses: with addresses computed inside the loops the compiler keeps their parts in vector registers,
/// and the next sums' loads wait behind this one's products.
template <class T>
struct Columns {
  using Element = T;
  const T* w[kLinearTileN];
  int count;  ///< sums beyond it are not computed, or dropped; w there must be readable all the same

  /// w[first, first + n) = rows of a matrix; beyond `have` the last is repeated.
  void set(int first, int n, const T* rows, std::int64_t ldw, int have) {
    for (int j = 0; j < n; ++j, rows += j < have ? ldw : 0) w[first + j] = rows;
  }
};

/// The weights of the next tile, asked for while this one is computed: with few rows of x a tile takes little longer than its
/// weights take from memory, and the first rows would wait for them. Evenly spread: a burst takes the line buffers that this
/// tile's own loads need. (For four rows or less the processor's own prefetching does better.)
template <class T>
struct Next {
  const Columns<T>* columns = nullptr;
  std::int64_t part = 0;  ///< bytes of four rows that fall to one panel
  std::int64_t step = 0;  ///< of them, with every step along K

  Next(const Columns<T>* next, std::int64_t rows, std::int64_t K) : columns(rows > 4 ? next : nullptr) {
    if (!columns) return;
    part = 4 * K * static_cast<std::int64_t>(sizeof(T)) / ((rows + 3) / 4);
    step = part * Dot<T>::kStep / K;
  }
  /// For columns [j, j + 4) of panel number `panel`, after `steps` along K: its part of their rows, which follow each other in memory.
  Ahead ahead(std::int64_t panel, int j, const Columns<T>& current, std::int64_t steps) const {
    return {reinterpret_cast<const char*>(columns ? columns->w[j] : current.w[j]) + panel * part + steps * step, step};
  }
};

/// Rows [m, m + kRows) of x by a tile's columns; `rows` of them exist. A row's sums go to store(m, sums).
template <class T, int kRows, bool kTail, class Store>
[[gnu::noinline]] void panel(const T* x, std::int64_t ldx, std::int64_t K, std::int64_t m, int rows, const Columns<T>& columns,
                             const Next<T>& next, std::int64_t number, const Store& store) {
  constexpr int kCols = 16 / kRows;
  alignas(64) accumulate_t<T> sums[kRows * kLinearTileN];
  const T* xs[kRows];
  for (int i = 0; i < kRows; ++i) xs[i] = x + (m + smaller(i, rows - 1)) * ldx;  // beyond `rows` the last again
  const std::int64_t whole = K / Dot<T>::kStep * Dot<T>::kStep;
  alignas(64) typename Dot<T>::V held[kRows * kLinearTileN];
  const auto columns_of_part = [&]<bool kResume, bool kSuspend>(std::int64_t begin, std::int64_t end) {
    for (int j = 0; j < columns.count; j += kCols)
      tile<T, kRows, kTail, kResume, kSuspend>(xs, columns.w + j, begin, end, K, next.ahead(number, j, columns, begin / Dot<T>::kStep),
                                               held + kRows * j, sums + j, kRows == 1 ? 4 : kLinearTileN);
  };
  if (kRows == 1 || whole < 2 * kPart<T>) {
    columns_of_part.template operator()<false, false>(0, whole);
  } else {
    columns_of_part.template operator()<false, true>(0, kPart<T>);
    std::int64_t k = kPart<T>;
    for (; k + kPart<T> < whole; k += kPart<T>) columns_of_part.template operator()<true, true>(k, k + kPart<T>);
    columns_of_part.template operator()<true, false>(k, whole);
  }
  for (int i = 0; i < rows; ++i) store(m + i, sums + i * kLinearTileN);
}

/// Rows [m0, m1) of x by a tile's columns; the first panel has number `number`.
template <class T, bool kTail, class Store>
void tile_rows(const T* x, std::int64_t ldx, std::int64_t K, std::int64_t m0, std::int64_t m1, const Columns<T>& columns, const Next<T>& next,
               std::int64_t number, const Store& store) {
  std::int64_t m = m0;
  for (; m + 2 <= m1; m += 4, ++number)
    panel<T, 4, kTail>(x, ldx, K, m, static_cast<int>(smaller<std::int64_t>(4, m1 - m)), columns, next, number, store);
  if (m < m1) panel<T, 1, kTail>(x, ldx, K, m, 1, columns, next, 0, store);
}

/// Tiles [begin, end) of p.x by columns_of(strip), and what becomes of their sums, store_of(strip). `more`: the caller means to go
/// on with tile `end` and what follows.
template <class Args, class ColumnsOf, class StoreOf>
void run_tiles(const Args& p, const LinearTiles& tiles, std::int64_t begin, std::int64_t end, bool more, const ColumnsOf& columns_of,
               const StoreOf& store_of) {
  using Set = decltype(columns_of(begin));
  using T = typename Set::Element;
  Set sets[2];  // this strip's columns and the next one's, in turn
  if (begin < end) sets[begin / tiles.steps % 2] = columns_of(tiles.strip(begin));
  for (std::int64_t t = begin; t < end; ++t) {
    const std::int64_t strip = tiles.strip(t), m_block = tiles.block_row(t), m0 = tiles.row(t);
    const std::int64_t m1 = smaller(m0 + kLinearTileM, p.M), rows = smaller(p.M - m_block, kLinearBlockM);
    const std::int64_t turn = t / tiles.steps;
    const Set &columns = sets[turn % 2], &after = sets[(turn + 1) % 2];
    const bool go_on = more || (turn + 1) * tiles.steps < end;
    if (go_on && (t == begin || t % tiles.steps == 0)) sets[(turn + 1) % 2] = columns_of((strip + 1) % tiles.strips);
    const Next<T> next(go_on && p.ldw == p.K ? &after : nullptr, rows, p.K);
    if (p.K % Dot<T>::kStep == 0) {
      tile_rows<T, false>(p.x, p.ldx, p.K, m0, m1, columns, next, (m0 - m_block) / 4, store_of(strip));
    } else {
      tile_rows<T, true>(p.x, p.ldx, p.K, m0, m1, columns, next, (m0 - m_block) / 4, store_of(strip));
    }
  }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
