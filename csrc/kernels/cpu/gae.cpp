#include "kernels/gae.h"

#include "kernels/cpu/transpose.h"
#include "kernels/cpu/vec_math.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kRows = 16;  ///< rows scanned together: their recurrences are independent, one lane each
/// Tokens a block: rows come in and go out transposed through the second-level cache. Shorter blocks jump between rows too
/// often for the machine's memory.
template <class T>
constexpr int kTokens = 2048 / sizeof(T);

template <class T, KlEstimator type>
void kl_rewards(const GaeArgs<T>& a, double coef, std::int64_t b) {
  const T* __restrict p = a.logprobs.row(b);
  const T* __restrict r = a.reference.row(b);
  const T* __restrict m = a.mask.row(b);
  T* __restrict out = a.advantages + b * a.num_tokens;
  const T c = static_cast<T>(coef);
  for (std::int64_t t = 0; t < a.num_tokens; ++t) {
    const bool valid = m[t] != T(0);
    out[t] = -token_kl_penalty(type, c, valid ? p[t] : T(0), valid ? r[t] : T(0));
  }
}

constexpr int kWidth = kNativeBytes / 8;  ///< rows a vector of doubles
constexpr int kVectors = kRows / kWidth;
using Doubles = double __attribute__((vector_size(kNativeBytes)));
using Longs = std::int64_t __attribute__((vector_size(kNativeBytes)));

/// kWidth values of T.
template <class T>
struct Narrow {
  typedef T type __attribute__((vector_size(sizeof(T) * kWidth), aligned(alignof(T)), may_alias));
};

template <class T>
NRL_VEC_INLINE Doubles load_doubles(const T* p) {
  return __builtin_convertvector(*reinterpret_cast<const typename Narrow<T>::type*>(p), Doubles);
}
template <class T>
NRL_VEC_INLINE void store_doubles(T* p, Doubles v) {
  *reinterpret_cast<typename Narrow<T>::type*>(p) = __builtin_convertvector(v, typename Narrow<T>::type);
}

/// A full vector of T and the integer vector of the same lanes.
template <class T>
struct Full {
  static constexpr int width = kNativeBytes / sizeof(T);
  using Vec = NativeFloats;
  using Mask = NativeInts;
};
template <>
struct Full<double> {
  static constexpr int width = kWidth;
  using Vec = Doubles;
  using Mask = Longs;
};

/// to[i][r] = rows[r * stride + i] for r < count, i < n; the other rows of `to` are left alone.
template <class T>
void load_transposed(const T* rows, std::int64_t stride, int count, int n, T (*to)[kRows]) {
  constexpr int W = Full<T>::width;
  for (int r = 0; r < count; r += W)
    for (int i = 0; i < n; i += W) {
      if (r + W <= count && i + W <= n) {
        typename Full<T>::Vec v[W];
        for (int k = 0; k < W; ++k) std::memcpy(&v[k], rows + (r + k) * stride + i, kNativeBytes);
        transpose_square<typename Full<T>::Mask>(v);
        for (int k = 0; k < W; ++k) std::memcpy(&to[i + k][r], &v[k], kNativeBytes);
      } else {
        for (int a = r; a < r + W && a < count; ++a)
          for (int b = i; b < i + W && b < n; ++b) to[b][a] = rows[a * stride + b];
      }
    }
}

/// The reverse: rows[r * stride + i] = from[i][r].
template <class T>
void store_transposed(const T (*from)[kRows], int count, int n, T* rows, std::int64_t stride) {
  constexpr int W = Full<T>::width;
  for (int r = 0; r < count; r += W)
    for (int i = 0; i < n; i += W) {
      if (r + W <= count && i + W <= n) {
        typename Full<T>::Vec v[W];
        for (int k = 0; k < W; ++k) std::memcpy(&v[k], &from[i + k][r], kNativeBytes);
        transpose_square<typename Full<T>::Mask>(v);
        for (int k = 0; k < W; ++k) std::memcpy(rows + (r + k) * stride + i, &v[k], kNativeBytes);
      } else {
        for (int a = r; a < r + W && a < count; ++a)
          for (int b = i; b < i + W && b < n; ++b) rows[a * stride + b] = from[b][a];
      }
    }
}

/// Up to kRows rows of the batch, transposed block by block.
template <class T>
struct RowGroup {
  std::int64_t first = 0;
  int count = 0;
  alignas(64) double decay[kRows] = {};
  alignas(64) double pending[kRows] = {};  ///< the reward, until the last valid token takes it
  GaeCarryOf<Doubles> carry[kVectors] = {};
  alignas(64) T value[kTokens<T>][kRows] = {}, mask[kTokens<T>][kRows] = {}, reward[kTokens<T>][kRows] = {};
  alignas(64) T out_advantage[kTokens<T>][kRows], out_return[kTokens<T>][kRows];
};

template <class T>
void start_group(RowGroup<T>& g, const GaeArgs<T>& a, const GaeConfig& c) {
  for (auto& carry : g.carry) carry = {};
  for (int r = 0; r < g.count; ++r) {
    const std::int64_t b = g.first + r;
    double length = 0;
    if (c.length_adaptive_alpha > 0)
      for (std::int64_t t = 0; t < a.num_tokens; ++t) length += a.mask.row(b)[t] != T(0) ? 1.0 : 0.0;
    g.decay[r] = c.gamma * gae_row_lambda(c, length);
    g.pending[r] = a.rewards[b];
    if (c.kl_coef == 0) continue;
    if (c.kl_type == KlEstimator::k1)
      kl_rewards<T, KlEstimator::k1>(a, c.kl_coef, b);
    else if (c.kl_type == KlEstimator::k2)
      kl_rewards<T, KlEstimator::k2>(a, c.kl_coef, b);
    else
      kl_rewards<T, KlEstimator::k3>(a, c.kl_coef, b);
  }
}

template <class T>
void load_block(RowGroup<T>& g, const GaeArgs<T>& a, bool kl, std::int64_t start, int n) {
  load_transposed(a.values.row(g.first) + start, a.values.row_stride, g.count, n, g.value);
  load_transposed(a.mask.row(g.first) + start, a.mask.row_stride, g.count, n, g.mask);
  // the KL penalties, left there before the scan
  if (kl) load_transposed<T>(a.advantages + g.first * a.num_tokens + start, a.num_tokens, g.count, n, g.reward);
}

template <class T>
void store_block(const RowGroup<T>& g, const GaeArgs<T>& a, std::int64_t start, int n) {
  store_transposed(g.out_advantage, g.count, n, a.advantages + g.first * a.num_tokens + start, a.num_tokens);
  store_transposed(g.out_return, g.count, n, a.returns + g.first * a.num_tokens + start, a.num_tokens);
}

template <bool decoupled, class T>
void scan_block(RowGroup<T>& g, const GaeConfig& c, int n) {
  const double gamma = c.gamma, decay_value = c.gamma * c.lambda_value;
  const Doubles zero{};
  Doubles decay[kVectors], pending[kVectors];
  GaeCarryOf<Doubles> carry[kVectors];  // in registers during the scan
  for (int j = 0; j < kVectors; ++j) {
    decay[j] = load_doubles(g.decay + j * kWidth), pending[j] = load_doubles(g.pending + j * kWidth);
    carry[j] = g.carry[j];
  }
  for (int i = n - 1; i >= 0; --i) {
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      const int r = j * kWidth;
      const Longs valid = load_doubles(g.mask[i] + r) != zero;
      const Doubles value = load_doubles(g.value[i] + r), reward = load_doubles(g.reward[i] + r) + pending[j];
      const GaeCarryOf<Doubles> next = gae_step_of<Doubles>(carry[j], reward, value, gamma, decay[j], decay_value);
      carry[j].next_value = valid ? next.next_value : carry[j].next_value;
      carry[j].advantage = valid ? next.advantage : carry[j].advantage;
      if (decoupled) carry[j].value_advantage = valid ? next.value_advantage : carry[j].value_advantage;
      pending[j] = valid ? zero : pending[j];
      store_doubles(g.out_advantage[i] + r, valid ? carry[j].advantage : zero);
      store_doubles(g.out_return[i] + r, (decoupled ? carry[j].value_advantage : carry[j].advantage) + value);
    }
  }
  for (int j = 0; j < kVectors; ++j) {
    store_doubles(g.pending + j * kWidth, pending[j]);
    g.carry[j] = carry[j];
  }
}

template <class T>
void run(const GaeArgs<T>& a, const GaeConfig& c, std::int64_t begin, std::int64_t end) {
  RowGroup<T> g;
  for (std::int64_t b = begin; b < end; b += kRows) {
    g.first = b;
    g.count = static_cast<int>(end - b < kRows ? end - b : kRows);
    start_group(g, a, c);
    for (std::int64_t stop = a.num_tokens; stop > 0; stop -= kTokens<T>) {
      const std::int64_t start = stop < kTokens<T> ? 0 : stop - kTokens<T>;
      const int n = static_cast<int>(stop - start);
      load_block(g, a, c.kl_coef != 0, start, n);
      if (c.decoupled)
        scan_block<true>(g, c, n);
      else
        scan_block<false>(g, c, n);
      store_block(g, a, start, n);
    }
  }
}

}  // namespace

void gae_f32(const GaeArgs<float>& a, const GaeConfig& c, std::int64_t begin, std::int64_t end) {
  run(a, c, begin, end);
}
void gae_f64(const GaeArgs<double>& a, const GaeConfig& c, std::int64_t begin, std::int64_t end) {
  run(a, c, begin, end);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
