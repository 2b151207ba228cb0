// How the backward products lay out their operands, so that the register tile streams through the first-level cache
// (the scheme of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
#pragma once
#include "kernels/cpu/plain.h"
#include "kernels/cpu/register_tile.h"
#include "kernels/cpu/terms.h"
#include "kernels/gemm.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// Whether sums are those of register_tile.
template <class T>
constexpr bool kInRegisterTile = kHasRegisterTile && sizeof(typename Terms<T>::Word) == 4 && Terms<T>::kPerWord == 1;

#if defined(__AVX512F__)
template <class T>
constexpr int kTileM = kInRegisterTile<T> ? kRegisterRows : 12;
template <class T>
constexpr int kVectorsN = kInRegisterTile<T> ? 3 : 2;
#elif defined(__AVX2__)
template <class T>
constexpr int kTileM = 6;
template <class T>
constexpr int kVectorsN = 2;
#else
template <class T>
constexpr int kTileM = 4;
template <class T>
constexpr int kVectorsN = 2;
#endif

/// Whether rows of a are packed a vector at a time.
template <class T>
constexpr bool kTurnsRows =
#if defined(__AVX512F__)
    sizeof(typename Terms<T>::Word) == 4;
#else
    false;
#endif

template <class T>
constexpr int kTileN = kVectorsN<T> * Terms<T>::V::kLanes;

template <class T>
constexpr bool kDividesTiles = kGemmTileM % kTileM<T> == 0 && kGemmTileN % kTileN<T> == 0;
static_assert(kDividesTiles<float> && kDividesTiles<double> && kDividesTiles<bfloat16>);

/// A panel of a: step s at s * kTileM. Packing may write up to a vector past the end of a step, and the tile may read a
/// step more.
template <class T>
constexpr std::int64_t panel_size(std::int64_t steps) {
  return steps * kTileM<T> + Terms<T>::V::kLanes;
}

/// As many panels of a as are packed together: a vector's lanes are rows of theirs.
template <class T>
constexpr int kPanelsTogether = kInRegisterTile<T> ? 2 : 1;
template <class T>
constexpr int kRowsTogether = kPanelsTogether<T> * kTileM<T>;

/// The steps of the block of terms that begins at k0.
template <class T>
struct Block {
  std::int64_t terms, steps;
  /// Of step s: of pairs, the last may have one.
  int terms_of(std::int64_t s) const {
    return static_cast<int>(smaller<std::int64_t>(Terms<T>::kPerWord, terms - s * Terms<T>::kPerWord));
  }
  Block(std::int64_t K, std::int64_t k0)
      : terms(smaller(kGemmTerms, K - k0)), steps((terms + Terms<T>::kPerWord - 1) / Terms<T>::kPerWord) {}
};

/// Step s of panels packed together: a lane for every row.
template <class T>
[[gnu::always_inline]] inline void put_step(typename Terms<T>::V rows, std::int64_t s, std::int64_t steps,
                                            typename Terms<T>::Word* panels) {
#if defined(__AVX512F__)
  if constexpr (kPanelsTogether<T> == 2) {
    return store_rows(rows.part[0], panels + s * kTileM<T>, panels + panel_size<T>(steps) + s * kTileM<T>);
  }
#endif
  store(panels + s * kTileM<T>, rows);
}

/// Steps [first, last) of kPanelsTogether panels of `steps` steps: rows [0, present) from a; absent rows are zero.
template <class T>
void pack_panels(const T* a, std::int64_t row_stride, std::int64_t col_stride, int present, const Block<T>& block,
                 std::int64_t first, std::int64_t last, typename Terms<T>::Word* panels) {
  using X = Terms<T>;
  using V = typename X::V;
  using Word = typename X::Word;
  std::int64_t s = first;
  if constexpr (kTurnsRows<T>) {
    if (row_stride == 1) {
      for (; s < last; ++s)
        put_step<T>(X::across(a + s * X::kPerWord * col_stride, col_stride, block.terms_of(s), present), s, block.steps,
                    panels);
      return;
    }
    for (; col_stride == 1 && s + V::kLanes <= last && (s + V::kLanes) * X::kPerWord <= block.terms; s += V::kLanes)
      turn_square<T>(a + s * X::kPerWord, row_stride, present, V::kLanes * X::kPerWord, V::kLanes,
                     [&](int i, V v) __attribute__((always_inline)) { put_step<T>(v, s + i, block.steps, panels); });
  }
  for (; s < last; ++s) {
    const std::int64_t k = s * X::kPerWord;
    for (int i = 0; i < kRowsTogether<T>; ++i) {
      const Word value =
          i < present ? X::word(a + i * row_stride + k * col_stride, block.terms_of(s), col_stride) : Word{};
      panels[i / kTileM<T> * panel_size<T>(block.steps) + s * kTileM<T> + i % kTileM<T>] = value;
    }
  }
}

/// Rows [m0, m1) of a block of a, as panels. Where a step's rows lie side by side in memory, every panel takes some
/// steps in turn; where a row's terms do, a panel is packed whole.
template <class T>
void pack_a(const GemmInput<T>& p, std::int64_t k0, std::int64_t m0, std::int64_t m1, typename Terms<T>::Word* panels) {
  const Block<T> block(p.K, k0);
  const std::int64_t turn = p.row_stride_a == 1 ? kGemmPackSteps : block.steps;
  for (std::int64_t first = 0; first < block.steps; first += turn)
    for (std::int64_t m = m0; m < m1; m += kRowsTogether<T>)
      pack_panels<T>(p.a + m * p.row_stride_a + k0 * p.col_stride_a, p.row_stride_a, p.col_stride_a,
                     static_cast<int>(smaller<std::int64_t>(kRowsTogether<T>, m1 - m)), block, first,
                     smaller(block.steps, first + turn), panels + (m - m0) / kTileM<T> * panel_size<T>(block.steps));
}

/// Bytes of b in a step of a strip.
template <class T>
constexpr int kBytesOfStep = kTileN<T> * Terms<T>::kPerWord * static_cast<int>(sizeof(T));

/// Terms [t0, t0 + kGemmPackTerms) of a block of b, as strips of kTileN columns; the last is filled up with zeros. The
/// terms after them are asked for meanwhile.
template <class T>
void pack_b(const GemmInput<T>& p, std::int64_t k0, std::int64_t t0) {
  using X = Terms<T>;
  using V = typename X::V;
  constexpr int kLanes = V::kLanes, kSteps = static_cast<int>(kGemmPackTerms) / X::kPerWord;
  const Block<T> block(p.K, k0);
  const std::int64_t first = t0 / X::kPerWord, last = smaller(block.steps, first + kSteps);
  const char* ahead = reinterpret_cast<const char*>(p.b + (k0 + t0 - p.first_term + kGemmPackTerms) * p.ldb);
  for (std::int64_t n = 0; n < p.N; n += kTileN<T>) {
    auto* out = static_cast<typename X::Word*>(p.packed_b) + n * block.steps + first * kTileN<T>;
    for (std::int64_t s = first; s < last; ++s) {
      for (int i = 0; i < kBytesOfStep<T>; i += 64, ahead += 64) __builtin_prefetch(ahead);
      for (int j = 0; j < kVectorsN<T>; ++j, out += kLanes) {
        __builtin_prefetch(out + 8 * kTileN<T>, 1, 2);
        const std::int64_t k = k0 + s * X::kPerWord - p.first_term, left = p.N - n - j * kLanes;
        if (left > 0) {
          store(out, X::across(p.b + k * p.ldb + n + j * kLanes, p.ldb, block.terms_of(s),
                               static_cast<int>(smaller<std::int64_t>(kLanes, left))));
        } else {
          store(out, V{});
        }
      }
    }
  }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
