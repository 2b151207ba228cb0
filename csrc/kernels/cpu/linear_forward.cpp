// The forward product as dot products: both operands run along K in memory, so weights need no repacking (the engine
// reads the trainer's storage) and one row costs no more than its share of many. Each output has one vector
// accumulator that walks K in steps of a vector, and one fixed tree that adds its lanes.
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

/// 16 sums: 4 rows of x by 4 of w (kRows = 4), or 1 row by 16 (kRows = 1, stride 4): the same operations an output.
template <class T, int kRows, bool kTail>
inline void tile(const T* const (&x)[kRows], const T* const (&w)[16 / kRows], std::int64_t K, typename Dot<T>::S::Scalar* out,
                 std::int64_t stride) {
  using D = Dot<T>;
  constexpr int kCols = 16 / kRows;
  typename D::V acc[16];
  for (auto& v : acc) v = D::S::zero();
  const std::int64_t whole = K / D::kStep * D::kStep;
  for (std::int64_t k = 0; k < whole; k += D::kStep) {
    typename D::Operand b[kCols];
    for (int j = 0; j < kCols; ++j) b[j] = D::load(w[j] + k);
    for (int i = 0; i < kRows; ++i) {
      const auto a = D::load(x[i] + k);
      for (int j = 0; j < kCols; ++j) acc[i * kCols + j] = D::mul_add(a, b[j], acc[i * kCols + j]);
    }
  }
  if constexpr (kTail) {
    const int rest = static_cast<int>(K - whole);
    for (int i = 0; i < kRows; ++i) {
      const auto a = D::load(x[i] + whole, rest);
      for (int j = 0; j < kCols; ++j) acc[i * kCols + j] = D::mul_add(a, D::load(w[j] + whole, rest), acc[i * kCols + j]);
    }
  }
  reduce_16<typename D::S>(acc, out, stride);
}

/// y[0, n) = sums (+ bias) (+ y), in this order for every output.
template <class T, class O>
inline void store_row(const LinearForwardArgs<T, O>& p, std::int64_t m, std::int64_t n0, int cols, const accumulate_t<T>* sums) {
  O* y = p.y + m * p.ldy + n0;
  const T* bias = p.bias ? p.bias + n0 : nullptr;
  for (int j = 0; j < cols; ++j) {
    accumulate_t<T> sum = sums[j];
    if (bias) sum += static_cast<accumulate_t<T>>(bias[j]);
    if (p.accumulate) sum += static_cast<accumulate_t<T>>(y[j]);
    y[j] = static_cast<O>(sum);
  }
}

/// The weights of the next tile, asked for bit by bit while this one is computed: with few rows of x a tile takes little
/// longer than its weights take from memory, and the first rows would wait for them. (For four rows or less the processor's own
/// prefetching does better.)
struct Ahead {
  const char* at = nullptr;
  const char* end = nullptr;
  std::int64_t step = 0;
  void fetch() {
    const char* const stop = end - at < step ? end : at + step;
    for (; at < stop; at += 64) __builtin_prefetch(at, 0, 2);
  }
};

/// `calls`: how often fetch will be called.
template <class T, class O>
Ahead tile_ahead(const LinearForwardArgs<T, O>& p, std::int64_t n0, std::int64_t calls) {
  const std::int64_t cols = smaller(kLinearTileN, p.N - n0), bytes = cols * p.K * static_cast<std::int64_t>(sizeof(T));
  if (p.ldw != p.K) return {};
  const char* const w = reinterpret_cast<const char*>(p.w + n0 * p.ldw);
  return {w, w + bytes, (bytes / calls + 64) / 64 * 64};
}

/// Rows [m, m + kRows) by the panel of columns [n0, n0 + cols). Beyond `rows` or `cols` the last is repeated; those
/// sums are dropped.
template <class T, class O, int kRows, bool kTail>
inline void panel(const LinearForwardArgs<T, O>& p, std::int64_t m, int rows, std::int64_t n0, int cols, Ahead& ahead) {
  constexpr int kCols = 16 / kRows;
  alignas(64) accumulate_t<T> sums[kRows * kLinearTileN];
  const T* x[kRows];
  for (int i = 0; i < kRows; ++i) x[i] = p.x + (m + smaller(i, rows - 1)) * p.ldx;
  for (int j = 0; j < cols; j += kCols) {
    const T* w[kCols];
    for (int c = 0; c < kCols; ++c) w[c] = p.w + (n0 + smaller(j + c, cols - 1)) * p.ldw;
    ahead.fetch();
    tile<T, kRows, kTail>(x, w, p.K, sums + j, kRows == 1 ? 4 : kLinearTileN);
  }
  for (int i = 0; i < rows; ++i) store_row(p, m + i, n0, cols, sums + i * kLinearTileN);
}

template <class T, class O, bool kTail>
void run_tiles(const LinearForwardArgs<T, O>& p, std::int64_t tile_begin, std::int64_t tile_end) {
  const std::int64_t tiles_n = (p.N + kLinearTileN - 1) / kLinearTileN;
  for (std::int64_t t = tile_begin; t < tile_end; ++t) {
    const std::int64_t m0 = t / tiles_n * kLinearBlockM, n0 = t % tiles_n * kLinearTileN;
    const std::int64_t m1 = smaller(m0 + kLinearBlockM, p.M);
    const int cols = static_cast<int>(smaller(kLinearTileN, p.N - n0));
    Ahead ahead;
    if (t + 1 < tile_end && m1 - m0 > 4) ahead = tile_ahead(p, (t + 1) % tiles_n * kLinearTileN, (m1 - m0 + 3) / 4 * ((cols + 3) / 4));
    std::int64_t m = m0;
    for (; m + 2 <= m1; m += 4) panel<T, O, 4, kTail>(p, m, static_cast<int>(smaller<std::int64_t>(4, m1 - m)), n0, cols, ahead);
    if (m < m1) panel<T, O, 1, kTail>(p, m, 1, n0, cols, ahead);
  }
}

template <class T, class O>
void linear_forward(const LinearForwardArgs<T, O>& p, std::int64_t tile_begin, std::int64_t tile_end) {
  if (p.K % Dot<T>::kStep == 0) {
    run_tiles<T, O, false>(p, tile_begin, tile_end);
  } else {
    run_tiles<T, O, true>(p, tile_begin, tile_end);
  }
}

}  // namespace

void linear_forward_f32(const LinearForwardArgs<float, float>& p, std::int64_t b, std::int64_t e) { linear_forward(p, b, e); }
void linear_forward_f64(const LinearForwardArgs<double, double>& p, std::int64_t b, std::int64_t e) { linear_forward(p, b, e); }
void linear_forward_bf16(const LinearForwardArgs<bfloat16, bfloat16>& p, std::int64_t b, std::int64_t e) { linear_forward(p, b, e); }
void linear_forward_bf16_f32(const LinearForwardArgs<bfloat16, float>& p, std::int64_t b, std::int64_t e) { linear_forward(p, b, e); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
