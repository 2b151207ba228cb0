// How the backward products lay out their operands, so that the register tile streams through the first-level cache
// (the scheme of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
#pragma once
#include "kernels/cpu/plain.h"
#include "kernels/cpu/register_tile.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/transpose.h"
#include "kernels/gemm.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// How panels are stored and multiplied. A "step" is one term of the sum, or a pair of them (bf16 instructions).
template <class T>
struct Panel {
  using S = simd_t<T>;
  using V = typename S::V;
  using Element = typename S::Scalar;  // what a panel holds for one row and step
  using Operand = V;
  static constexpr int kPair = 1;
  static Element make(const T* a, std::int64_t, bool) { return static_cast<Element>(*a); }
  static Operand broadcast(const Element* p) { return S::set1(*p); }
  static Operand load(const Element* p) { return S::load(p); }
  static V mul_add(Operand a, Operand b, V c) { return S::fma(a, b, c); }
  /// One step of a row of B, n <= kLanes values from b (the second row of a pair is at b + ldb).
  static void pack_row(const T* b, std::int64_t, bool, int n, Element* out) { S::store(out, rows(b, 0, false, n)); }
  /// One step of n <= kLanes rows of a that lie side by side.
  static V rows(const T* a, std::int64_t, bool, int n) { return n == S::kLanes ? S::load(a) : S::load(a, n); }
  /// kLanes steps of one row of a, from a.
  static V steps(const T* a) { return S::load(a); }
};

#if defined(__AVX512BF16__)
template <>
struct Panel<bfloat16> {
  using S = F32;
  using V = __m512;
  using Element = std::uint32_t;  // two consecutive terms
  using Operand = __m512bh;
  static constexpr int kPair = 2;
  static Element make(const bfloat16* a, std::int64_t stride, bool has_second) {
    return a->bits | (has_second ? static_cast<std::uint32_t>(a[stride].bits) << 16 : 0u);
  }
  static Operand broadcast(const Element* p) {
    return reinterpret_cast<Operand>(_mm512_set1_epi32(static_cast<int>(*p)));
  }
  static Operand load(const Element* p) { return reinterpret_cast<Operand>(_mm512_loadu_si512(p)); }
  static V mul_add(Operand a, Operand b, V c) { return _mm512_dpbf16_ps(c, a, b); }
  static void pack_row(const bfloat16* b, std::int64_t ldb, bool has_second, int n, Element* out) {
    _mm512_storeu_ps(out, rows(b, ldb, has_second, n));
  }
  static V rows(const bfloat16* b, std::int64_t ldb, bool has_second, int n) {
    const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, b));
    const __m512i high =
        has_second ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, b + ldb)) : _mm512_setzero_si512();
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
  static V steps(const bfloat16* a) { return _mm512_loadu_ps(a); }
};
#endif

/// Whether sums are those of register_tile.
template <class T>
constexpr bool kInRegisterTile = kHasRegisterTile && std::is_same_v<typename Panel<T>::Element, float>;

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
    sizeof(typename Panel<T>::Element) == 4;
#else
    false;
#endif

template <class T>
constexpr int kTileN = kVectorsN<T> * simd_t<T>::kLanes;

template <class T>
constexpr bool kDividesTiles = kGemmTileM % kTileM<T> == 0 && kGemmTileN % kTileN<T> == 0;
static_assert(kDividesTiles<float> && kDividesTiles<double> && kDividesTiles<bfloat16>);

/// A panel of a: step s at s * kTileM. Packing may write up to a vector past the end of a step, and the tile may read a
/// step more.
template <class T>
constexpr std::int64_t panel_size(std::int64_t steps) {
  return steps * kTileM<T> + Panel<T>::S::kLanes;
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
  Block(std::int64_t K, std::int64_t k0)
      : terms(smaller(kGemmTerms, K - k0)), steps((terms + Panel<T>::kPair - 1) / Panel<T>::kPair) {}
};

constexpr std::int64_t kPackSteps =
    16;  // steps of every panel of a packed in turn: their pages stay in the translation cache

/// Step s of panels packed together: a lane for every row.
template <class T>
[[gnu::always_inline]] inline void put_step(typename Panel<T>::V rows, std::int64_t s, std::int64_t steps,
                                            typename Panel<T>::Element* panels) {
#if defined(__AVX512F__)
  if constexpr (kPanelsTogether<T> == 2) {
    return store_rows(rows, panels + s * kTileM<T>, panels + panel_size<T>(steps) + s * kTileM<T>);
  }
#endif
  __builtin_memcpy(panels + s * kTileM<T>, &rows, sizeof(rows));
}

/// Steps [first, last) of kPanelsTogether panels of `steps` steps: rows [0, present) from a; absent rows are zero.
template <class T>
void pack_panels(const T* a, std::int64_t row_stride, std::int64_t col_stride, int present, const Block<T>& block,
                 std::int64_t first, std::int64_t last, typename Panel<T>::Element* panels) {
  using P = Panel<T>;
  using S = typename P::S;
  using Element = typename P::Element;
  std::int64_t s = first;
  if constexpr (kTurnsRows<T>) {
    if (row_stride == 1) {
      for (; s < last; ++s)
        put_step<T>(P::rows(a + s * P::kPair * col_stride, col_stride, s * P::kPair + 1 < block.terms, present), s,
                    block.steps, panels);
      return;
    }
    for (; col_stride == 1 && s + S::kLanes <= last && (s + S::kLanes) * P::kPair <= block.terms; s += S::kLanes) {
      typename P::V v[S::kLanes];
      for (int i = 0; i < S::kLanes; ++i) v[i] = i < present ? P::steps(a + i * row_stride + s * P::kPair) : S::zero();
      transpose_square<decltype(v[0] < v[0])>(v);
      for (int i = 0; i < S::kLanes; ++i) put_step<T>(v[i], s + i, block.steps, panels);
    }
  }
  for (; s < last; ++s) {
    const std::int64_t k = s * P::kPair;
    for (int i = 0; i < kRowsTogether<T>; ++i) {
      const Element value =
          i < present ? P::make(a + i * row_stride + k * col_stride, col_stride, k + 1 < block.terms) : Element{};
      panels[i / kTileM<T> * panel_size<T>(block.steps) + s * kTileM<T> + i % kTileM<T>] = value;
    }
  }
}

/// Rows [m0, m1) of a block of a, as panels. Where a step's rows lie side by side in memory, every panel takes some
/// steps in turn; where a row's terms do, a panel is packed whole.
template <class T>
void pack_a(const GemmInput<T>& p, std::int64_t k0, std::int64_t m0, std::int64_t m1,
            typename Panel<T>::Element* panels) {
  const Block<T> block(p.K, k0);
  const std::int64_t turn = p.row_stride_a == 1 ? kPackSteps : block.steps;
  for (std::int64_t first = 0; first < block.steps; first += turn)
    for (std::int64_t m = m0; m < m1; m += kRowsTogether<T>)
      pack_panels<T>(p.a + m * p.row_stride_a + k0 * p.col_stride_a, p.row_stride_a, p.col_stride_a,
                     static_cast<int>(smaller<std::int64_t>(kRowsTogether<T>, m1 - m)), block, first,
                     smaller(block.steps, first + turn), panels + (m - m0) / kTileM<T> * panel_size<T>(block.steps));
}

/// Bytes of b in a step of a strip.
template <class T>
constexpr int kBytesOfStep = kTileN<T> * Panel<T>::kPair * static_cast<int>(sizeof(T));

/// Terms [t0, t0 + kGemmPackTerms) of a block of b, as strips of kTileN columns; the last is filled up with zeros. The
/// terms after them are asked for meanwhile.
template <class T>
void pack_b(const GemmInput<T>& p, std::int64_t k0, std::int64_t t0) {
  using P = Panel<T>;
  constexpr int kLanes = P::S::kLanes, kSteps = static_cast<int>(kGemmPackTerms) / P::kPair;
  const Block<T> block(p.K, k0);
  const std::int64_t first = t0 / P::kPair, last = smaller(block.steps, first + kSteps);
  const char* ahead = reinterpret_cast<const char*>(p.b + (k0 + t0 + kGemmPackTerms) * p.ldb);
  for (std::int64_t n = 0; n < p.N; n += kTileN<T>) {
    auto* out = static_cast<typename P::Element*>(p.packed_b) + n * block.steps + first * kTileN<T>;
    for (std::int64_t s = first; s < last; ++s) {
      for (int i = 0; i < kBytesOfStep<T>; i += 64, ahead += 64) __builtin_prefetch(ahead);
      for (int j = 0; j < kVectorsN<T>; ++j, out += kLanes) {
        __builtin_prefetch(out + 8 * kTileN<T>, 1, 2);
        const std::int64_t k = k0 + s * P::kPair, left = p.N - n - j * kLanes;
        if (left > 0) {
          P::pack_row(p.b + k * p.ldb + n + j * kLanes, p.ldb, k + 1 < k0 + block.terms,
                      static_cast<int>(smaller<std::int64_t>(kLanes, left)), out);
        } else {
          fill(out, kLanes, typename P::Element{});
        }
      }
    }
  }
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
