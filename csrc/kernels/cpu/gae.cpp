#include "kernels/gae.h"

#include "kernels/cpu/plain.h"
#include "kernels/cpu/vec_register.h"
#include "kernels/token_rows.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kRows = 16;          ///< rows scanned together: their recurrences are independent, one lane each
constexpr int kBlockBytes = 2048;  ///< of a row in a block
/// Tokens a block: rows come in and go out transposed through the second-level cache. Shorter blocks jump between rows
/// too often for the machine's memory.
template <class T>
constexpr int kTokens = kBlockBytes / sizeof(T);

template <class T, KlEstimator type>
void kl_rewards(const GaeArgs<T>& a, double coef, std::int64_t b) {
  const T* __restrict p = row_of(a, a.logprobs, b);
  const T* __restrict r = row_of(a, a.reference, b);
  const T* __restrict m = row_of(a, a.mask, b);
  T* __restrict out = a.advantages + row_begin(a, b);
  const T c = static_cast<T>(coef);
  const std::int64_t n = row_length(a, b);
  for (std::int64_t t = 0; t < n; ++t) {
    const bool valid = m[t] != T(0);
    out[t] = -token_kl_penalty(type, c, valid ? p[t] : T(0), valid ? r[t] : T(0));
  }
}

using Doubles = Register<double>;
constexpr int kWidth = kRegisterLanes<double>;  ///< rows a register of doubles
constexpr int kVectors = kRows / kWidth;

/// Lanes whose value is not 0, and a choice by them.
#if defined(__AVX512F__)
using Valid = __mmask8;
NRL_VEC Valid not_zero(const float* p) {
  return _mm256_cmp_ps_mask(_mm256_loadu_ps(p), _mm256_setzero_ps(), _CMP_NEQ_UQ);
}
NRL_VEC Valid not_zero(const double* p) {
  return _mm512_cmp_pd_mask(_mm512_loadu_pd(p), _mm512_setzero_pd(), _CMP_NEQ_UQ);
}
NRL_VEC Doubles choose(Valid valid, Doubles a, Doubles b) {
  return reinterpret_cast<Doubles>(
      _mm512_mask_mov_pd(reinterpret_cast<__m512d>(b), valid, reinterpret_cast<__m512d>(a)));
}
#else
using Valid = RegisterBits<double>;
template <class T>
NRL_VEC Valid not_zero(const T* p) {
  return load_doubles(p) != Doubles{};
}
NRL_VEC Doubles choose(Valid valid, Doubles a, Doubles b) { return valid ? a : b; }
#endif

/// The memory of the block after this one, asked for line by line while this one is worked on: neither waits for the
/// other.
class Prefetch {
 public:
  /// `count` rows of `bytes` from `first` on, `stride` bytes apart.
  void add(const void* first, std::int64_t stride, int count, std::int64_t bytes) {
    runs_[num_runs_++] = {static_cast<const char*>(first), stride, count, static_cast<int>(bytes / 64)};
  }
  /// The next n lines. Those of a row that has fewer left are not there to be read; asking for them does no harm.
  NRL_INLINE_MEMBER void ask(int n) {
    if (left_ == 0 && !next_row()) return;
    for (int k = 0; k < n; ++k) __builtin_prefetch(line_ + 64 * k, 0, 2);
    line_ += 64 * n;
    left_ = left_ > n ? left_ - n : 0;
  }

 private:
  struct Run {
    const char* row;
    std::int64_t stride;
    int rows, lines;
  };
  bool next_row() {
    for (; run_ < num_runs_; ++run_) {
      Run& r = runs_[run_];
      if (r.rows == 0 || r.lines == 0) continue;
      line_ = r.row, left_ = r.lines;
      r.row += r.stride, --r.rows;
      return true;
    }
    return false;
  }
  Run runs_[4];
  int num_runs_ = 0, run_ = 0, left_ = 0;
  const char* line_ = nullptr;
};

/// Lines that a step of the scan and a square of a transposition ask for: together all of a block's four arrays.
constexpr int kLinesOfBlock = 4 * kRows * kBlockBytes / 64;
template <class T>
constexpr int kAskStep = kLinesOfBlock / 2 / kTokens<T>;
template <class T>
constexpr int kAskSquare = kLinesOfBlock / 2 / (4 * (kRows / kRegisterLanes<T>)*(kTokens<T> / kRegisterLanes<T>));

/// The rows of a block: where each begins in an array, and how many of its tokens lie in the block, at most n.
template <class T>
struct BlockRows {
  int count = 0, n = 0;
  T* row[kRows];
  int have[kRows];
  /// Tokens that all of W rows from r on have; of rows that do not exist, none.
  int common(int r, int W) const {
    if (r + W > count) return 0;
    int least = n;
    for (int k = r; k < r + W; ++k) least = smaller(least, have[k]);
    return least;
  }
};

/// to[i][r] = token i of row r, where there is one; the rest of `to` is left alone.
template <class T>
void load_transposed(const BlockRows<const T>& rows, T (*to)[kRows], Prefetch& ahead) {
  constexpr int W = kRegisterLanes<T>;
  for (int r = 0; r < rows.count; r += W) {
    const int common = rows.common(r, W);
    for (int i = 0; i < rows.n; i += W) {
      ahead.ask(kAskSquare<T>);
      if (i + W <= common) {
        Register<T> v[W];
        for (int k = 0; k < W; ++k) v[k] = load(rows.row[r + k] + i);
        transpose(v);
        for (int k = 0; k < W; ++k) store(&to[i + k][r], v[k]);
      } else {
        for (int a = r; a < r + W && a < rows.count; ++a)
          for (int b = i; b < i + W && b < rows.have[a]; ++b) to[b][a] = rows.row[a][b];
      }
    }
  }
}

/// The reverse: token i of row r = from[i][r].
template <class T>
void store_transposed(const T (*from)[kRows], const BlockRows<T>& rows, Prefetch& ahead) {
  constexpr int W = kRegisterLanes<T>;
  for (int r = 0; r < rows.count; r += W) {
    const int common = rows.common(r, W);
    for (int i = 0; i < rows.n; i += W) {
      ahead.ask(kAskSquare<T>);
      if (i + W <= common) {
        Register<T> v[W];
        for (int k = 0; k < W; ++k) v[k] = load(&from[i + k][r]);
        transpose(v);
        for (int k = 0; k < W; ++k) store(rows.row[r + k] + i, v[k]);
      } else {
        for (int a = r; a < r + W && a < rows.count; ++a)
          for (int b = i; b < i + W && b < rows.have[a]; ++b) rows.row[a][b] = from[b][a];
      }
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
      for (std::int64_t t = 0; t < row_length(a, b); ++t) length += row_of(a, a.mask, b)[t] != T(0) ? 1.0 : 0.0;
    g.decay[r] = c.gamma * gae_row_lambda(c, length);
    g.pending[r] = a.rewards[b];
    if (c.kl_coef == 0) continue;
    if (c.kl_type == KlEstimator::k1) kl_rewards<T, KlEstimator::k1>(a, c.kl_coef, b);
    else if (c.kl_type == KlEstimator::k2) kl_rewards<T, KlEstimator::k2>(a, c.kl_coef, b);
    else kl_rewards<T, KlEstimator::k3>(a, c.kl_coef, b);
  }
}

/// The group's rows of an array from token `start` on; row_at(b) is where row b begins.
template <class E, class T, class RowAt>
BlockRows<E> block_rows(const RowGroup<T>& g, const GaeArgs<T>& a, std::int64_t start, int n, const RowAt& row_at) {
  BlockRows<E> rows;
  rows.count = g.count, rows.n = n;
  for (int r = 0; r < g.count; ++r) {
    rows.row[r] = row_at(g.first + r) + start;
    rows.have[r] = static_cast<int>(clamped(row_length(a, g.first + r) - start, 0, n));
  }
  return rows;
}

template <class T>
void load_block(RowGroup<T>& g, const GaeArgs<T>& a, bool kl, std::int64_t start, int n, Prefetch& ahead) {
  const auto load_rows = [&](T(*to)[kRows], const auto& row_at) {
    load_transposed(block_rows<const T>(g, a, start, n, row_at), to, ahead);
  };
  load_rows(g.value, [&](std::int64_t b) { return row_of(a, a.values, b); });
  load_rows(g.mask, [&](std::int64_t b) { return row_of(a, a.mask, b); });
  // the KL penalties, left there before the scan
  if (kl) load_rows(g.reward, [&](std::int64_t b) { return a.advantages + row_begin(a, b); });
  for (int r = 0; a.offsets != nullptr && r < g.count; ++r)  // behind the end of a row nothing is valid
    for (std::int64_t i = clamped(row_length(a, g.first + r) - start, 0, n); i < n; ++i) g.mask[i][r] = T(0);
}

template <class T>
void store_block(const RowGroup<T>& g, const GaeArgs<T>& a, std::int64_t start, int n, Prefetch& ahead) {
  const auto store_rows = [&](const T(*from)[kRows], T* to) {
    const auto row_at = [&](std::int64_t b) { return to + row_begin(a, b); };
    store_transposed(from, block_rows<T>(g, a, start, n, row_at), ahead);
  };
  store_rows(g.out_advantage, a.advantages);
  store_rows(g.out_return, a.returns);
}

template <bool kl, bool decoupled, class T>
void scan_block(RowGroup<T>& g, const GaeConfig& c, int n, Prefetch& ahead) {
  const double gamma = c.gamma, decay_value = c.gamma * c.lambda_value;
  const Doubles zero{};
  Doubles decay[kVectors], pending[kVectors];
  GaeCarryOf<Doubles> carry[kVectors];  // in registers during the scan
  for (int j = 0; j < kVectors; ++j) {
    decay[j] = load_doubles(g.decay + j * kWidth), pending[j] = load_doubles(g.pending + j * kWidth);
    carry[j] = g.carry[j];
  }
  for (int i = n - 1; i >= 0; --i) {
    ahead.ask(kAskStep<T>);
#pragma GCC unroll 8
    for (int j = 0; j < kVectors; ++j) {
      const int r = j * kWidth;
      const Valid valid = not_zero(g.mask[i] + r);
      const Doubles value = load_doubles(g.value[i] + r),
                    reward = kl ? load_doubles(g.reward[i] + r) + pending[j] : pending[j];
      const GaeCarryOf<Doubles> next = gae_step_of<Doubles>(carry[j], reward, value, gamma, decay[j], decay_value);
      carry[j].next_value = choose(valid, next.next_value, carry[j].next_value);
      carry[j].advantage = choose(valid, next.advantage, carry[j].advantage);
      if (decoupled) carry[j].value_advantage = choose(valid, next.value_advantage, carry[j].value_advantage);
      pending[j] = choose(valid, zero, pending[j]);
      store_doubles(g.out_advantage[i] + r, choose(valid, carry[j].advantage, zero));
      store_doubles(g.out_return[i] + r, (decoupled ? carry[j].value_advantage : carry[j].advantage) + value);
    }
  }
  for (int j = 0; j < kVectors; ++j) {
    store_doubles(g.pending + j * kWidth, pending[j]);
    g.carry[j] = carry[j];
  }
}

/// The block of `a` that ends before token `stop` of the rows from `first` on; that of the next rows' last tokens where
/// stop is 0.
template <class T>
Prefetch next_block(const GaeArgs<T>& a, std::int64_t first, std::int64_t stop, std::int64_t end) {
  if (stop <= 0) first += kRows, stop = a.num_tokens;
  Prefetch ahead;
  if (first >= end || a.offsets != nullptr) return ahead;  // rows without padding follow one another
  const std::int64_t start = stop < kTokens<T> ? 0 : stop - kTokens<T>, bytes = (stop - start) * sizeof(T);
  const int count = static_cast<int>(end - first < kRows ? end - first : kRows);
  for (const MatrixView<T>& m :
       {a.values, a.mask, MatrixView<T>{a.advantages, a.num_tokens}, MatrixView<T>{a.returns, a.num_tokens}})
    ahead.add(m.row(first) + start, m.row_stride * static_cast<std::int64_t>(sizeof(T)), count, bytes);
  return ahead;
}

template <class T>
void run(const GaeArgs<T>& a, const GaeConfig& c, std::int64_t begin, std::int64_t end) {
  RowGroup<T> g;
  const bool kl = c.kl_coef != 0;
  const auto scan = kl ? (c.decoupled ? scan_block<true, true, T> : scan_block<true, false, T>)
                       : (c.decoupled ? scan_block<false, true, T> : scan_block<false, false, T>);
  for (std::int64_t b = begin; b < end; b += kRows) {
    g.first = b;
    g.count = static_cast<int>(end - b < kRows ? end - b : kRows);
    start_group(g, a, c);
    std::int64_t longest = 0;
    for (int r = 0; r < g.count; ++r) longest = larger(longest, row_length(a, b + r));
    for (std::int64_t stop = longest; stop > 0; stop -= kTokens<T>) {
      const std::int64_t start = stop < kTokens<T> ? 0 : stop - kTokens<T>;
      const int n = static_cast<int>(stop - start);
      Prefetch ahead = next_block(a, b, start, end);
      load_block(g, a, kl, start, n, ahead);
      scan(g, c, n, ahead);
      store_block(g, a, start, n, ahead);
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
