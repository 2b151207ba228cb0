// The forward product y = x · w^T without repacking w, because the engine reads the trainer's storage. Every output is
// one chain of multiply-adds along K in ascending order. So the bits do not depend on the operand in the vector lanes:
//   many rows of x: lanes hold rows of x. x is packed so that its rows lie side by side. One weight at a time is read
//     into all lanes. Without bfloat16 instructions, strips of bfloat16 weights are widened first, because widening a
//     weight in all lanes costs as much as reading it.
//   few rows of x: lanes hold rows of w, which are transposed in registers. So one row of x does not cost as much as
//     a whole vector of rows.
#pragma once
#include "kernels/cpu/terms.h"
#include "kernels/linear.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

#if defined(__AVX512F__)
constexpr int kMostVectors = 4, kSums = 24;  // a tile: so many vectors of rows, so many sums in registers
#elif defined(__AVX2__)
constexpr int kMostVectors = 2, kSums = 12;
#else
constexpr int kMostVectors = 1, kSums = 4;
#endif

/// Asks for the memory of n values that will be written. If a row ends within a cache line, storing would wait for that
/// line.
template <class O>
[[gnu::always_inline]] inline void ask_for_writing(O* values, int n) {
  for (int j = 0; j < n; j += 64 / static_cast<int>(sizeof(O))) __builtin_prefetch(values + j, 1, 2);
  __builtin_prefetch(values + n - 1, 1, 2);
}

/// Columns of a register tile of so many vectors of rows. Never more than there are registers for addresses.
constexpr int columns_of_tile(int vectors) { return vectors == 1 ? smaller(kSums, 12) : kSums / vectors; }
static_assert(kLinearTileN % columns_of_tile(1) == 0 && kLinearTileN % columns_of_tile(kMostVectors) == 0);

/// Rows of a panel of packed x.
template <class T>
constexpr int kPanelRows = kMostVectors * Terms<T>::V::kLanes;
static_assert(kLinearTileM % kPanelRows<float> == 0 && kLinearTileM % kPanelRows<double> == 0);

/// Addresses of a tile's rows of w. If the loops computed the addresses, the compiler would keep parts of them in
/// vector registers, and the loads for the next sums would wait for this one's products.
template <class T, std::int64_t kTileN>
struct Columns {
  static constexpr std::int64_t kWidth = kTileN;
  const T* w[kWidth];
  int count;  ///< sums beyond it are not computed or are dropped, but their rows of w must be readable

  /// w[first, first + n) = rows of a matrix; beyond `have` the last is repeated.
  void set(int first, int n, const T* rows, std::int64_t ldw, int have) {
    for (int j = 0; j < n; ++j, rows += j < have ? ldw : 0) w[first + j] = rows;
  }
};

/// Memory to prefetch while a tile is computed. With few rows, a tile takes little longer than reading its weights from
/// memory. So memory is asked for in the order of its addresses: prefetching each row a little ahead reaches
/// two thirds of that speed. The requests are spread evenly, because a burst takes the line buffers that this tile
/// needs.
struct Ahead {
  const char* at;
  std::int64_t step;  ///< bytes with every four words along K, or every turn

  /// While the tile at column j of a strip is computed: that at column `next`, which may lie in the strip after it.
  /// Only where the rows of w follow one another without a gap (`prefetch`).
  template <class Set>
  static Ahead of(const Set& columns, const Set& after, int j, int next, bool prefetch, std::int64_t step) {
    if (!prefetch) return {reinterpret_cast<const char*>(columns.w[j]), 0};
    return {reinterpret_cast<const char*>(next < columns.count ? columns.w[next]
                                                               : after.w[(next - columns.count) % Set::kWidth]),
            step};
  }
};

/// Bytes of w in four words of every column.
template <class T, int kColumns>
constexpr int kBytesOfQuads = 4 * Terms<T>::kPerWord * kColumns * static_cast<int>(sizeof(T));

/// Whether words of w come from registers where each serves one product: Zen 4 reads three words into all lanes while
/// it multiplies four.
template <class T>
constexpr bool kShufflesQuads = Terms<T>::kOrder == SumOrder::pairs;

/// out[c][kVectors * kLanes] = the sums of kVectors vectors of rows and columns w[0, kColumns).
template <class T, int kVectors, int kColumns>
[[gnu::always_inline]] inline void row_tile(const typename Terms<T>::Word* x, const T* const* w, std::int64_t K,
                                            Ahead ahead, typename Terms<T>::Word* out) {
  using X = Terms<T>;
  using V = typename X::V;
  V acc[kColumns][kVectors];
  for (auto& column : acc)
    for (auto& v : column) v = V{};
  const auto multiply = [&](const auto& weight) __attribute__((always_inline)) {
    V rows[kVectors];
    for (int v = 0; v < kVectors; ++v, x += V::kLanes) rows[v] = load<V>(x);
#pragma GCC unroll 12
    for (int c = 0; c < kColumns; ++c) {
      auto each = weight(c);
      for (int v = 0; v < kVectors; ++v) acc[c][v] = X::multiply_add(rows[v], each, acc[c][v]);
    }
  };
  std::int64_t k = 0;
  for (; k + 4 * X::kPerWord <= K; k += 4 * X::kPerWord) {
    for (int offset = 0; offset < kBytesOfQuads<T, kColumns>; offset += 64) __builtin_prefetch(ahead.at + offset, 0, 2);
    ahead.at += ahead.step;
    if constexpr (kVectors == 1 && kShufflesQuads<T>) {
      V quads[kColumns];
      for (int c = 0; c < kColumns; ++c) quads[c] = X::quad(w[c] + k);
      [&]<int... u>(std::integer_sequence<int, u...>) __attribute__((always_inline)) {
        (multiply([&](int c) { return X::template of_quad<u>(quads[c]); }), ...);
      }(std::make_integer_sequence<int, 4>{});
    } else {
#pragma GCC unroll 4
      for (int u = 0; u < 4; ++u) multiply([&](int c) { return X::quad_weight(w[c] + k, u); });
    }
  }
  for (; k < K; k += X::kPerWord) {
    const int terms = static_cast<int>(smaller<std::int64_t>(K - k, X::kPerWord));
    multiply([&](int c) { return V(X::word(w[c] + k, terms)); });
  }
  for (int c = 0; c < kColumns; ++c)
    for (int v = 0; v < kVectors; ++v) store(out + (c * kVectors + v) * V::kLanes, acc[c][v]);
}

/// sums[kLanes][width] = columns[count][rows], from row `first` on.
template <class V>
NRL_VEC void turn_sums(const typename V::Scalar* columns, int rows, int first, int count, std::int64_t width,
                       typename V::Scalar* sums) {
  for (int c = 0; c < count; c += V::kLanes) {
    V v[V::kLanes];
    for (int i = 0; i < V::kLanes; ++i) v[i] = load<V>(columns + (c + i) * rows + first);
    transpose(v);
    for (int i = 0; i < V::kLanes; ++i) store(sums + i * width + c, v[i]);
  }
}

/// The panel of kVectors vectors of rows that begins at row m; `rows` of them exist. A row's sums go to store(m, sums);
/// what is asked for beside the tile of kColumns columns at j, ahead_of(j, kColumns).
template <class T, int kVectors, class Set, class AheadOf, class Store>
[[gnu::noinline]] void panel(const typename Terms<T>::Word* x, std::int64_t m, std::int64_t rows, std::int64_t K,
                             const Set& columns, const AheadOf& ahead_of, const Store& store) {
  using V = typename Terms<T>::V;
  constexpr int kColumns = columns_of_tile(kVectors), kRows = kVectors * V::kLanes;
  alignas(64) typename V::Scalar by_column[Set::kWidth * kRows], sums[V::kLanes * Set::kWidth];
  for (int j = 0; j < columns.count; j += kColumns) {
    row_tile<T, kVectors, kColumns>(x, columns.w + j, K, ahead_of(j, kColumns), by_column + j * kRows);
  }
  for (int first = 0; first < kRows && first < rows; first += V::kLanes) {
    turn_sums<V>(by_column, kRows, first, columns.count, Set::kWidth, sums);
    for (int i = 0; i < V::kLanes && first + i < rows; ++i) store(m + first + i, sums + i * Set::kWidth);
  }
}

/// Bytes of w in a turn of so many rows.
template <int kRows>
constexpr int kBytesOfTurn = 16 * kRows;

/// out[r][kWidth] = sums of kLanes rows of w with kRows rows of packed x, which lie `row_words` apart.
template <class T, int kRows, std::int64_t kWidth>
[[gnu::noinline]] void few_rows_tile(const typename Terms<T>::Word* x, std::int64_t row_words, const T* const* w,
                                     std::int64_t K, Ahead ahead, typename Terms<T>::Word* out) {
  using X = Terms<T>;
  using V = typename X::V;
  V acc[kRows];
  for (auto& v : acc) v = V{};
  std::int64_t k = 0;
  const auto* words = x;
  if constexpr (Turned<T>::kAvailable) {
    constexpr int kTerms = Turned<T>::kTerms;
    for (; k + kTerms <= K; k += kTerms) {
      for (int offset = 0; offset < kBytesOfTurn<V::kLanes>; offset += 64) __builtin_prefetch(ahead.at + offset, 0, 2);
      ahead.at += ahead.step;
      const Turned<T> turned(w, k);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q, words += X::kPerColumn)
        for (int r = 0; r < kRows; ++r) acc[r] = X::add_column(turned.column[q], words + r * row_words, acc[r]);
    }
  }
  for (; k < K; k += X::kPerWord, ++words) {
    auto weights = gathered(w, k, K);
    for (int r = 0; r < kRows; ++r) acc[r] = X::multiply_add(weights, V(words[r * row_words]), acc[r]);
  }
  for (int r = 0; r < kRows; ++r) store(out + r * kWidth, acc[r]);
}

template <class T, int kRows, class Set, class Store>
void few_rows(const LinearInput<T>& p, const Set& columns, const Set& after, bool prefetch, const Store& store) {
  using X = Terms<T>;
  alignas(64) typename X::Word sums[kRows * Set::kWidth];
  const auto* x = static_cast<const typename X::Word*>(p.packed);
  for (int j = 0; j < columns.count; j += X::V::kLanes) {
    const auto ahead = Ahead::of(columns, after, j, j + X::V::kLanes, prefetch, kBytesOfTurn<X::V::kLanes>);
    few_rows_tile<T, kRows, Set::kWidth>(x, packed_row_words<T>(p.K), columns.w + j, p.K, ahead, sums + j);
  }
  for (int m = 0; m < kRows; ++m) store(m, sums + m * Set::kWidth);
}

/// One tile: up to kLinearTileM of M rows, from m0, by a strip's columns.
template <class T, class Set, class AheadOf, class Store>
void tile_rows(const void* packed, std::int64_t M, std::int64_t K, std::int64_t m0, const Set& columns,
               const AheadOf& ahead_of, const Store& store) {
  constexpr int kLanes = Terms<T>::V::kLanes;
  const std::int64_t m1 = smaller(m0 + kLinearTileM, M), words = words_of<T>(K);
  for (std::int64_t m = m0; m < m1; m += kPanelRows<T>) {
    const auto* x = static_cast<const typename Terms<T>::Word*>(packed) + m * words;
    const std::int64_t rows = smaller<std::int64_t>(m1 - m, kPanelRows<T>);
    with_constant<kMostVectors>(static_cast<int>((rows + kLanes - 1) / kLanes),
                                [&](auto vectors) { panel<T, vectors()>(x, m, rows, K, columns, ahead_of, store); });
  }
}

/// Whether strips of w are widened before the product with many rows. A lane's word is then always one float32.
template <class T>
constexpr bool kWidensStrips = false;
#if defined(__AVX2__) && !defined(__AVX512F__)
template <>
constexpr bool kWidensStrips<bfloat16> = true;
#endif

/// Distance from one widened row to the next. Rows at a distance of a multiple of 4 KiB would evict each other from the
/// first-level cache.
constexpr std::int64_t widened_stride(std::int64_t K) { return (K + 15) / 16 * 16 + 16; }

/// A strip's rows of w as float32, in `room`.
template <class T, std::int64_t kWidth>
Columns<float, kWidth> widened(const Columns<T, kWidth>& columns, std::int64_t K, float* room) {
  using V = ShortVec<float>;
  Columns<float, kWidth> out;
  out.count = columns.count;
  for (int j = 0; j < kWidth; ++j) {
    const bool repeated = j > 0 && columns.w[j] == columns.w[j - 1];
    float* const row = room + j * widened_stride(K);
    out.w[j] = repeated ? out.w[j - 1] : row;
    if (repeated) continue;
    std::int64_t k = 0;
    for (; k + V::kLanes <= K; k += V::kLanes) store(row + k, load<V>(columns.w[j] + k));
    for (; k < K; ++k) row[k] = static_cast<float>(columns.w[j][k]);
  }
  return out;
}

/// Computes tiles [begin, end) of p. columns_of(strip) gives the columns, store_of(strip) takes the sums. `more`: the
/// caller means to continue with tile `end`.
template <class T, class ColumnsOf, class StoreOf>
void run_tiles(const LinearInput<T>& p, const LinearTiles& tiles, std::int64_t ldw, std::int64_t begin,
               std::int64_t end, bool more, const ColumnsOf& columns_of, const StoreOf& store_of) {
  using Set = decltype(columns_of(begin));
  const bool prefetch = ldw == p.K;
  Set sets[2];  // this strip's columns and the next one's, in turn
  [[maybe_unused]] Columns<float, Set::kWidth> wide;
  if (begin < end) sets[begin / tiles.steps % 2] = columns_of(tiles.strip(begin));
  for (std::int64_t t = begin; t < end; ++t) {
    const std::int64_t strip = tiles.strip(t), turn = t / tiles.steps;
    const Set& columns = sets[turn % 2];
    Set& after = sets[(turn + 1) % 2];
    const bool go_on = more || (turn + 1) * tiles.steps < end;
    if (t == begin || t % tiles.steps == 0) after = columns_of(go_on ? (strip + 1) % tiles.strips : strip);
    if (p.M <= kLinearFewRows) {  // a tile is a whole strip
      with_constant<kLinearFewRows>(
          static_cast<int>(p.M), [&](auto rows) { few_rows<T, rows()>(p, columns, after, prefetch, store_of(strip)); });
      continue;
    }
    if constexpr (kWidensStrips<T>) {
      if (p.strip_room != nullptr) {
        if (t == begin || t % tiles.steps == 0) wide = widened(columns, p.K, p.strip_room);
        const auto ahead_of = [&](int j, int n) {
          return Ahead{reinterpret_cast<const char*>(after.w[j]), prefetch ? 4 * n * std::int64_t{sizeof(T)} : 0};
        };
        tile_rows<float>(p.packed, p.M, p.K, tiles.row(t), wide, ahead_of, store_of(strip));
        continue;
      }
    }
    const auto ahead_of = [&](int j, int n) {  // two tiles on: about as long as memory takes
      return Ahead::of(columns, after, j, j + 2 * n, prefetch, 4 * Terms<T>::kPerWord * n * std::int64_t{sizeof(T)});
    };
    tile_rows<T>(p.packed, p.M, p.K, tiles.row(t), columns, ahead_of, store_of(strip));
  }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
