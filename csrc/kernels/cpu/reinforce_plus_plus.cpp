#include "kernels/reinforce_plus_plus.h"

#include "kernels/token_rows.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

template <class T, KlEstimator type>
void penalised_row(const TokenAdvantageArgs<T>& a, std::int64_t b) {
  const T coef = static_cast<T>(a.kl_coef), advantage = a.advantages[b];
  const T* __restrict m = row_of(a, a.mask, b);
  const T* __restrict p = row_of(a, a.logprobs, b);
  const T* __restrict r = row_of(a, a.reference, b);
  T* __restrict out = a.out + row_begin(a, b);
  const std::int64_t n = row_length(a, b);
  for (std::int64_t t = 0; t < n; ++t) {
    const bool valid = m[t] != T(0);
    out[t] = advantage - token_kl_penalty(type, coef, valid ? p[t] : T(0), valid ? r[t] : T(0));
  }
}

template <class T>
void rows(const TokenAdvantageArgs<T>& a, std::int64_t begin, std::int64_t end) {
  for (std::int64_t b = begin; b < end; ++b) {
    if (!a.logprobs.data) {
      T* const out = a.out + row_begin(a, b);
      for (std::int64_t t = 0, n = row_length(a, b); t < n; ++t) out[t] = a.advantages[b];
    } else if (a.kl_type == KlEstimator::k1) {
      penalised_row<T, KlEstimator::k1>(a, b);
    } else if (a.kl_type == KlEstimator::k2) {
      penalised_row<T, KlEstimator::k2>(a, b);
    } else {
      penalised_row<T, KlEstimator::k3>(a, b);
    }
  }
}

}  // namespace

void token_advantages_f32(const TokenAdvantageArgs<float>& a, std::int64_t begin, std::int64_t end) {
  rows(a, begin, end);
}
void token_advantages_f64(const TokenAdvantageArgs<double>& a, std::int64_t begin, std::int64_t end) {
  rows(a, begin, end);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
