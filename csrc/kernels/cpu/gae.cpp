#include "kernels/gae.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kRows = 16;    ///< rows scanned together: their recurrences are independent, one lane each
constexpr int kTokens = 32;  ///< tokens a block: rows come in and go out transposed through the first-level cache

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

/// Up to kRows rows of the batch, transposed block by block.
template <class T>
struct RowGroup {
  std::int64_t first = 0;
  int count = 0;
  alignas(64) double decay[kRows] = {};
  alignas(64) double next_value[kRows] = {}, advantage[kRows] = {}, value_advantage[kRows] = {};
  alignas(64) double pending[kRows] = {};  ///< the reward, until the last valid token takes it
  alignas(64) T value[kTokens][kRows] = {}, mask[kTokens][kRows] = {}, reward[kTokens][kRows] = {};
  alignas(64) T out_advantage[kTokens][kRows], out_return[kTokens][kRows];
};

template <class T>
void start_group(RowGroup<T>& g, const GaeArgs<T>& a, const GaeConfig& c) {
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
  for (int r = 0; r < g.count; ++r) {
    const T* value = a.values.row(g.first + r) + start;
    const T* mask = a.mask.row(g.first + r) + start;
    for (int i = 0; i < n; ++i) g.value[i][r] = value[i];
    for (int i = 0; i < n; ++i) g.mask[i][r] = mask[i];
    const T* reward = a.advantages + (g.first + r) * a.num_tokens + start;  // the KL penalties, left there before the
                                                                            // scan
    if (kl)
      for (int i = 0; i < n; ++i) g.reward[i][r] = reward[i];
  }
}

template <class T>
void store_block(const RowGroup<T>& g, const GaeArgs<T>& a, std::int64_t start, int n) {
  for (int r = 0; r < g.count; ++r) {
    T* __restrict advantage = a.advantages + (g.first + r) * a.num_tokens + start;
    T* __restrict returns = a.returns + (g.first + r) * a.num_tokens + start;
    for (int i = 0; i < n; ++i) advantage[i] = g.out_advantage[i][r];
    for (int i = 0; i < n; ++i) returns[i] = g.out_return[i][r];
  }
}

template <bool decoupled, class T>
void scan_block(RowGroup<T>& g, const GaeConfig& c, int n) {
  const double gamma = c.gamma, decay_value = c.gamma * c.lambda_value;
  for (int i = n - 1; i >= 0; --i) {
    for (int r = 0; r < kRows; ++r) {
      const bool valid = g.mask[i][r] != T(0);
      const double value = g.value[i][r];
      const double reward = static_cast<double>(g.reward[i][r]) + g.pending[r];
      const GaeCarry carry{g.next_value[r], g.advantage[r], g.value_advantage[r]};
      const GaeCarry next = gae_step(carry, reward, value, gamma, g.decay[r], decay_value);
      g.next_value[r] = valid ? next.next_value : carry.next_value;
      g.advantage[r] = valid ? next.advantage : carry.advantage;
      if (decoupled) g.value_advantage[r] = valid ? next.value_advantage : carry.value_advantage;
      g.pending[r] = valid ? 0.0 : g.pending[r];
      g.out_advantage[i][r] = valid ? static_cast<T>(g.advantage[r]) : T(0);
      g.out_return[i][r] = static_cast<T>((decoupled ? g.value_advantage[r] : g.advantage[r]) + value);
    }
  }
}

template <class T>
void run(const GaeArgs<T>& a, const GaeConfig& c, std::int64_t begin, std::int64_t end) {
  for (std::int64_t b = begin; b < end; b += kRows) {
    RowGroup<T> g;
    g.first = b;
    g.count = static_cast<int>(end - b < kRows ? end - b : kRows);
    start_group(g, a, c);
    for (std::int64_t stop = a.num_tokens; stop > 0; stop -= kTokens) {
      const std::int64_t start = stop < kTokens ? 0 : stop - kTokens;
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
