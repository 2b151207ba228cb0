#include "kernels/gae.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kRows = 8;  ///< rows scanned together: their recurrences are independent and hide each other's latency

/// One row's terms that do not depend on the scan: the KL rewards (left in `advantages`), the last valid token, lambda.
template <class T>
struct RowPlan {
  const T* value = nullptr;
  const T* mask = nullptr;
  T* advantage = nullptr;
  T* returns = nullptr;
  double reward = 0, decay = 0;
  std::int64_t last = -1;
};

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

template <class T>
RowPlan<T> plan_row(const GaeArgs<T>& a, const GaeConfig& c, std::int64_t b) {
  RowPlan<T> row;
  row.value = a.values.row(b);
  row.mask = a.mask.row(b);
  row.advantage = a.advantages + b * a.num_tokens;
  row.returns = a.returns + b * a.num_tokens;
  row.reward = a.rewards[b];
  std::int64_t length = 0;
  for (std::int64_t t = 0; t < a.num_tokens; ++t) length += row.mask[t] != T(0) ? 1 : 0;
  row.last = a.num_tokens - 1;
  while (row.last >= 0 && row.mask[row.last] == T(0)) --row.last;
  row.decay = c.gamma * gae_row_lambda(c, static_cast<double>(length));
  if (c.kl_coef != 0) {
    if (c.kl_type == KlEstimator::k1) kl_rewards<T, KlEstimator::k1>(a, c.kl_coef, b);
    else if (c.kl_type == KlEstimator::k2) kl_rewards<T, KlEstimator::k2>(a, c.kl_coef, b);
    else kl_rewards<T, KlEstimator::k3>(a, c.kl_coef, b);
  }
  return row;
}

template <int R, bool decoupled, bool kl, class T>
void scan(const RowPlan<T>* rows, const GaeConfig& c, std::int64_t num_tokens) {
  GaeCarry carry[R];
  const double gamma = c.gamma, decay_value = c.gamma * c.lambda_value;
  for (std::int64_t t = num_tokens - 1; t >= 0; --t) {
    for (int r = 0; r < R; ++r) {
      const RowPlan<T>& row = rows[r];
      const double value = row.value[t];
      double reward = kl ? static_cast<double>(row.advantage[t]) : 0.0;
      reward += t == row.last ? row.reward : 0.0;
      const bool valid = row.mask[t] != T(0);
      const GaeCarry next = gae_step(carry[r], reward, value, gamma, row.decay, decoupled ? decay_value : row.decay);
      carry[r].next_value = valid ? next.next_value : carry[r].next_value;
      carry[r].advantage = valid ? next.advantage : carry[r].advantage;
      if (decoupled) carry[r].value_advantage = valid ? next.value_advantage : carry[r].value_advantage;
      row.advantage[t] = valid ? static_cast<T>(carry[r].advantage) : T(0);
      row.returns[t] = static_cast<T>((decoupled ? carry[r].value_advantage : carry[r].advantage) + value);
    }
  }
}

template <int R, class T>
void scan_rows(const GaeArgs<T>& a, const GaeConfig& c, std::int64_t b) {
  RowPlan<T> rows[R];
  for (int r = 0; r < R; ++r) rows[r] = plan_row(a, c, b + r);
  const bool kl = c.kl_coef != 0;
  if (c.decoupled) kl ? scan<R, true, true>(rows, c, a.num_tokens) : scan<R, true, false>(rows, c, a.num_tokens);
  else kl ? scan<R, false, true>(rows, c, a.num_tokens) : scan<R, false, false>(rows, c, a.num_tokens);
}

template <class T>
void run(const GaeArgs<T>& a, const GaeConfig& c, std::int64_t begin, std::int64_t end) {
  std::int64_t b = begin;
  for (; b + kRows <= end; b += kRows) scan_rows<kRows>(a, c, b);
  for (; b < end; ++b) scan_rows<1>(a, c, b);
}

}  // namespace

void gae_f32(const GaeArgs<float>& a, const GaeConfig& c, std::int64_t begin, std::int64_t end) { run(a, c, begin, end); }
void gae_f64(const GaeArgs<double>& a, const GaeConfig& c, std::int64_t begin, std::int64_t end) { run(a, c, begin, end); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
