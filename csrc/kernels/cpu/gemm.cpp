// The backward products: panels of both operands are packed so that the register tile streams through the first-level
// cache (the scheme of Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008).
#include <cstdlib>

#include "kernels/cpu/plain.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/transpose.h"
#include "kernels/linear.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr std::int64_t kBlockK = 1024;  // terms summed in registers between two visits of C
constexpr std::int64_t kRowsA = 120;    // rows of A packed at a time: with a strip of B they stay in the second-level cache
constexpr std::int64_t kPackSteps = 16; // steps of every panel packed in turn: their pages stay in the translation cache

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
  static void pack_row(const T* b, std::int64_t, bool, int n, Element* out) {
    S::store(out, n == S::kLanes ? S::load(b) : S::load(b, n));
  }
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
  static Operand broadcast(const Element* p) { return reinterpret_cast<Operand>(_mm512_set1_epi32(static_cast<int>(*p))); }
  static Operand load(const Element* p) { return reinterpret_cast<Operand>(_mm512_loadu_si512(p)); }
  static V mul_add(Operand a, Operand b, V c) { return _mm512_dpbf16_ps(c, a, b); }
  static void pack_row(const bfloat16* b, std::int64_t ldb, bool has_second, int n, Element* out) {
    const __mmask16 mask = static_cast<__mmask16>((1u << n) - 1);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, b));
    const __m512i high = has_second ? _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, b + ldb)) : _mm512_setzero_si512();
    _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }
};
#endif

#if defined(__AVX512F__)
constexpr int kTileM = 12, kVectorsN = 2;
#elif defined(__AVX2__)
constexpr int kTileM = 6, kVectorsN = 2;
#else
constexpr int kTileM = 4, kVectorsN = 2;
#endif
static_assert(kGemmBlockM % kTileM == 0 && kRowsA % kTileM == 0);

template <class T>
constexpr int kTileN = kVectorsN* simd_t<T>::kLanes;

/// acc[kTileM][kTileN] = panel of A · panel of B over `steps` steps, then added to (or stored in) c.
template <class T>
inline void micro_kernel(const typename Panel<T>::Element* a, const typename Panel<T>::Element* b, std::int64_t steps,
                         accumulate_t<T>* c, std::int64_t ldc, int rows, int cols, bool add) {
  using P = Panel<T>;
  using S = typename P::S;
  typename P::V acc[kTileM][kVectorsN];
  for (auto& row : acc)
    for (auto& v : row) v = S::zero();
  for (std::int64_t s = 0; s < steps; ++s, a += kTileM, b += kTileN<T>) {
    typename P::Operand bv[kVectorsN];
    for (int j = 0; j < kVectorsN; ++j) bv[j] = P::load(b + j * S::kLanes);
#pragma GCC unroll 12
    for (int i = 0; i < kTileM; ++i) {
      const auto av = P::broadcast(a + i);
      for (int j = 0; j < kVectorsN; ++j) acc[i][j] = P::mul_add(av, bv[j], acc[i][j]);
    }
  }
  if (rows == kTileM && cols == kTileN<T>) {
    for (int i = 0; i < kTileM; ++i)
      for (int j = 0; j < kVectorsN; ++j) {
        auto* out = c + i * ldc + j * S::kLanes;
        S::store(out, add ? S::add(S::load(out), acc[i][j]) : acc[i][j]);
      }
    return;
  }
  accumulate_t<T> full[kTileM][kTileN<T>];
  for (int i = 0; i < kTileM; ++i)
    for (int j = 0; j < kVectorsN; ++j) S::store(&full[i][j * S::kLanes], acc[i][j]);
  for (int i = 0; i < rows; ++i)
    for (int j = 0; j < cols; ++j) c[i * ldc + j] = add ? c[i * ldc + j] + full[i][j] : full[i][j];
}

/// A panel of A: step s at s * kTileM. Packing may write up to a vector past the end of a step.
template <class T>
constexpr std::int64_t panel_size(std::int64_t steps) {
  return steps * kTileM + Panel<T>::S::kLanes;
}

/// Steps [first, last) of one panel: rows [0, present) from a; absent rows are zero.
template <class T>
void pack_panel(const T* a, std::int64_t row_stride, std::int64_t col_stride, int present, std::int64_t terms, std::int64_t first, std::int64_t last,
                typename Panel<T>::Element* panel) {
  using P = Panel<T>;
  using Element = typename P::Element;
  std::int64_t s = first;
#if defined(__AVX512F__)
  if constexpr (sizeof(Element) == 4) {
    if (row_stride == 1 && kTileM <= P::S::kLanes) {
      for (; s < last; ++s) P::pack_row(a + s * P::kPair * col_stride, col_stride, s * P::kPair + 1 < terms, present, panel + s * kTileM);
      return;
    }
    if (col_stride == 1 && sizeof(T) * P::kPair == 4) {
      for (; s + 16 <= last && (s + 16) * P::kPair <= terms; s += 16) {
        using Words = std::int32_t __attribute__((vector_size(64)));
        Words r[16];
        for (int i = 0; i < 16; ++i) r[i] = i < present ? reinterpret_cast<Words>(_mm512_loadu_si512(a + i * row_stride + s * P::kPair)) : Words{};
        transpose_square<Words>(r);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(panel + (s + i) * kTileM, reinterpret_cast<__m512i>(r[i]));
      }
    }
  }
#endif
  for (; s < last; ++s) {
    const std::int64_t k = s * P::kPair;
    Element* const out = panel + s * kTileM;
    for (int i = 0; i < present; ++i) out[i] = P::make(a + i * row_stride + k * col_stride, col_stride, k + 1 < terms);
    for (int i = present; i < kTileM; ++i) out[i] = Element{};
  }
}

/// Rows [m0, m0 + rows) x terms [k0, k0 + terms) of A as panels of kTileM rows. Where a step's rows lie side by side in
/// memory, every panel takes some steps in turn; where a row's terms do, a panel is packed whole.
template <class T, class O>
void pack_a(const GemmArgs<T, O>& p, std::int64_t m0, std::int64_t rows, std::int64_t k0, std::int64_t terms,
            typename Panel<T>::Element* panels) {
  const std::int64_t steps = (terms + Panel<T>::kPair - 1) / Panel<T>::kPair, turn = p.row_stride_a == 1 ? kPackSteps : steps;
  for (std::int64_t first = 0; first < steps; first += turn)
    for (std::int64_t m = 0; m < rows; m += kTileM)
      pack_panel(p.a + (m0 + m) * p.row_stride_a + k0 * p.col_stride_a, p.row_stride_a, p.col_stride_a,
                 static_cast<int>(smaller<std::int64_t>(kTileM, rows - m)), terms, first, smaller(steps, first + turn),
                 panels + m / kTileM * panel_size<T>(steps));
}

/// Terms [k0, k0 + terms) of B as strips of kTileN columns.
template <class T, class O>
void pack_b(const GemmArgs<T, O>& p, std::int64_t k0, std::int64_t terms, typename Panel<T>::Element* panels) {
  using P = Panel<T>;
  constexpr int kLanes = P::S::kLanes;
  const std::int64_t steps = (terms + P::kPair - 1) / P::kPair;
  for (std::int64_t first = 0; first < steps; first += kPackSteps)
    for (std::int64_t n = 0; n < p.N; n += kTileN<T>) {
      auto* out = panels + n * steps + first * kTileN<T>;
      for (std::int64_t s = first; s < smaller(steps, first + kPackSteps); ++s)
        for (int j = 0; j < kVectorsN; ++j, out += kLanes) {
          const std::int64_t k = s * P::kPair, left = p.N - n - j * kLanes;
          if (left > 0) {
            P::pack_row(p.b + (k0 + k) * p.ldb + n + j * kLanes, p.ldb, k + 1 < terms,
                        static_cast<int>(smaller<std::int64_t>(kLanes, left)), out);
          } else {
            fill(out, kLanes, typename P::Element{});
          }
        }
    }
}

/// Scratch that lives as long as its thread: fresh pages for each call would cost more than the packing.
struct ThreadBuffer {
  void* data = nullptr;
  std::size_t bytes = 0;
  ~ThreadBuffer() { std::free(data); }
};

template <class E>
E* scratch(std::int64_t n, int which) {
  thread_local ThreadBuffer buffers[3];
  ThreadBuffer& buffer = buffers[which];
  const std::size_t bytes = (static_cast<std::size_t>(n) * sizeof(E) + 63) / 64 * 64;
  if (buffer.bytes < bytes) {
    std::free(buffer.data);
    buffer.data = std::aligned_alloc(64, bytes);
    if (!buffer.data) __builtin_trap();
    buffer.bytes = bytes;
  }
  return static_cast<E*>(buffer.data);
}

template <class T, class O>
void gemm(const GemmArgs<T, O>& p, std::int64_t block_begin, std::int64_t block_end) {
  using P = Panel<T>;
  using A = accumulate_t<T>;
  constexpr bool kDirect = std::is_same_v<A, O>;  // C itself can hold the partial sums
  const std::int64_t first = block_begin * kGemmBlockM, last = smaller(block_end * kGemmBlockM, p.M);
  const std::int64_t panels_n = (p.N + kTileN<T> - 1) / kTileN<T>;
  const std::int64_t steps_max = (kBlockK + P::kPair - 1) / P::kPair;
  auto* b = scratch<typename P::Element>(panels_n * kTileN<T> * steps_max, 0);
  auto* a = scratch<typename P::Element>(kRowsA / kTileM * panel_size<T>(steps_max), 1);
  A* sums = nullptr;
  if constexpr (!kDirect) sums = scratch<A>((last - first) * p.N, 2);
  for (std::int64_t k0 = 0; k0 < p.K; k0 += kBlockK) {
    const std::int64_t terms = smaller(kBlockK, p.K - k0), steps = (terms + P::kPair - 1) / P::kPair;
    pack_b(p, k0, terms, b);
    for (std::int64_t m0 = first; m0 < last; m0 += kRowsA) {
      const std::int64_t rows = smaller(kRowsA, last - m0);
      pack_a(p, m0, rows, k0, terms, a);
      for (std::int64_t pn = 0; pn < panels_n; ++pn)
        for (std::int64_t m = 0; m < rows; m += kTileM) {
          const std::int64_t n = pn * kTileN<T>;
          A* c;
          std::int64_t ldc;
          if constexpr (kDirect) {
            c = p.c + (m0 + m) * p.ldc + n, ldc = p.ldc;
          } else {
            c = sums + (m0 - first + m) * p.N + n, ldc = p.N;
          }
          micro_kernel<T>(a + m / kTileM * panel_size<T>(steps), b + n * steps, steps, c, ldc, static_cast<int>(smaller<std::int64_t>(kTileM, rows - m)),
                          static_cast<int>(smaller<std::int64_t>(kTileN<T>, p.N - n)), k0 > 0 || (kDirect && p.accumulate));
        }
    }
  }
  if constexpr (!kDirect) {
    for (std::int64_t m = first; m < last; ++m)
      for (std::int64_t n = 0; n < p.N; ++n) {
        const A sum = sums[(m - first) * p.N + n];
        O& c = p.c[m * p.ldc + n];
        c = static_cast<O>(p.accumulate ? static_cast<A>(c) + sum : sum);
      }
  }
}

}  // namespace

void gemm_f32(const GemmArgs<float, float>& p, std::int64_t b, std::int64_t e) { gemm(p, b, e); }
void gemm_f64(const GemmArgs<double, double>& p, std::int64_t b, std::int64_t e) { gemm(p, b, e); }
void gemm_bf16(const GemmArgs<bfloat16, bfloat16>& p, std::int64_t b, std::int64_t e) { gemm(p, b, e); }
void gemm_bf16_f32(const GemmArgs<bfloat16, float>& p, std::int64_t b, std::int64_t e) { gemm(p, b, e); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
