// Reinforce++ before its whitening: a sample's advantage on each of its tokens, less the KL penalty of the token.
//   a[b, t] = advantage[b] - kl_coef * K(logprobs[b, t], reference[b, t])      (Hu, 2025, arXiv:2501.03262)
#pragma once
#include "kernels/kl.h"
#include "kernels/matrix_view.h"

namespace nemo_rl::kernels {

template <class T>
struct TokenAdvantageArgs {
  std::int64_t num_rows = 0;
  std::int64_t num_tokens = 0;
  const T* advantages = nullptr;            ///< [B]
  MatrixView<T> mask, logprobs, reference;  ///< the last two null without a KL term; not read where the mask is 0
  double kl_coef = 0;
  KlEstimator kl_type = KlEstimator::k3;
  T* out = nullptr;                       ///< [B, S] contiguous
  const std::int64_t* offsets = nullptr;  ///< without padding (kernels/token_rows.h); the CPU alone
};

constexpr double kRewardKlInputClamp = 20.0, kRewardKlOutputClamp = 10.0;

template <class T>
NRL_INLINE T token_kl_penalty(KlEstimator type, T coef, T logprob, T reference) {
  return coef * kl_term(type, logprob, reference, T(1), T(kRewardKlInputClamp), T(kRewardKlOutputClamp)).value;
}

template <class T>
using TokenAdvantageKernel = void(const TokenAdvantageArgs<T>&, std::int64_t begin, std::int64_t end);
NRL_DECLARE_CPU_KERNEL(token_advantages_f32, TokenAdvantageKernel<float>);
NRL_DECLARE_CPU_KERNEL(token_advantages_f64, TokenAdvantageKernel<double>);

}  // namespace nemo_rl::kernels
