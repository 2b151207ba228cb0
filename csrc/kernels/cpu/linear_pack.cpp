// Packing for the forward product. x: panels with their rows side by side, or, for few rows, rows as words. w, where
// rows are many: strips.
#include "kernels/cpu/product_table.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// out[word][stride]: a square, turned.
template <class T>
NRL_VEC void pack_square(const T* x, std::int64_t ldx, std::int64_t rows, std::int64_t terms, std::int64_t words,
                         std::int64_t stride, typename Terms<T>::Word* out) {
  turn_square<T>(x, ldx, rows, terms, words,
                 [&](int i, typename Terms<T>::V v) __attribute__((always_inline)) { store(out + i * stride, v); });
}

template <class T>
void pack_panels(const LinearInput<T>& p, std::int64_t first, std::int64_t last) {
  using X = Terms<T>;
  constexpr int kLanes = X::V::kLanes;
  const std::int64_t words = words_of<T>(p.K);
  for (std::int64_t m = first; m < last; m += kPanelRows<T>) {
    auto* const panel = static_cast<typename X::Word*>(p.packed) + m * words;
    const std::int64_t rows = smaller<std::int64_t>(last - m, kPanelRows<T>),
                       stride = (rows + kLanes - 1) / kLanes * kLanes;
    for (std::int64_t s = 0; s < words; s += kLanes)
      for (std::int64_t r = 0; r < rows; r += kLanes)
        pack_square(p.x + (m + r) * p.ldx + s * X::kPerWord, p.ldx, rows - r, p.K - s * X::kPerWord, words - s, stride,
                    panel + s * stride + r);
  }
}

template <class T>
void pack_rows(const LinearInput<T>& p) {
  using X = Terms<T>;
  const std::int64_t row_words = packed_row_words<T>(p.K);
  for (std::int64_t m = 0; m < p.M; ++m)
    for (std::int64_t s = 0; s < row_words; s += X::V::kLanes)
      store(static_cast<typename X::Word*>(p.packed) + m * row_words + s,
            X::words(p.x + m * p.ldx + s * X::kPerWord,
                     static_cast<int>(smaller<std::int64_t>(p.K - s * X::kPerWord, X::V::kLanes * X::kPerWord))));
}

template <class T>
void pack(const LinearInput<T>& p, std::int64_t begin, std::int64_t end) {
  if (p.M <= kLinearFewRows) return pack_rows(p);
  pack_panels(p, begin * kLinearTileM, smaller(end * kLinearTileM, p.M));
}

template <class T>
void pack_weights(const T* w, std::int64_t ldw, std::int64_t rows, std::int64_t K, float* out) {
  if constexpr (kHasWide<T>) {
    constexpr int kLanes = Terms<T>::V::kLanes, kPerWord = Terms<T>::kPerWord;
    const std::int64_t words = words_of<T>(K);
    const char* ahead = reinterpret_cast<const char*>(
        w + kLanes * ldw);  // the following rows, in the order in which they lie in memory
    for (std::int64_t r = 0; r < kLinearTileN; r += kLanes)
      for (std::int64_t k = 0; k < words; k += kLanes) {
        for (int i = 0; i < kLanes; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
        pack_square(w + r * ldw + k * kPerWord, ldw, rows - r, K - k * kPerWord, words - k, kLinearTileN,
                    out + k * kLinearTileN + r);
      }
  }
}

template <class T>
LinearWide wide(std::int64_t K) {
  return {ProductTable<T>::wide_from(words_of<T>(K)), words_of<T>(K)};
}

}  // namespace

void linear_pack_weights_f32(const float* w, std::int64_t ldw, std::int64_t rows, std::int64_t K, float* out) {
  pack_weights(w, ldw, rows, K, out);
}
void linear_pack_weights_bf16(const bfloat16* w, std::int64_t ldw, std::int64_t rows, std::int64_t K, float* out) {
  pack_weights(w, ldw, rows, K, out);
}
LinearWide linear_wide_f32(std::int64_t K) { return wide<float>(K); }
LinearWide linear_wide_bf16(std::int64_t K) { return wide<bfloat16>(K); }
std::int64_t linear_strip_floats_bf16(std::int64_t M, std::int64_t K, std::int64_t tile_n) {
  return kWidensStrips<bfloat16> && M > kLinearFewRows ? tile_n * widened_stride(K) : 0;
}
void linear_pack_f32(const LinearInput<float>& p, std::int64_t b, std::int64_t e) { pack(p, b, e); }
void linear_pack_f64(const LinearInput<double>& p, std::int64_t b, std::int64_t e) { pack(p, b, e); }
void linear_pack_bf16(const LinearInput<bfloat16>& p, std::int64_t b, std::int64_t e) { pack(p, b, e); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
