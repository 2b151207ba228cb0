// Generalized advantage estimation (Schulman et al., 2016, arXiv:1506.02438) with carry-forward masking.
//
// From the last token to the first, over the valid ones (mask 1) alone:
//   delta_t = r_t + gamma V_next - V_t,     A_t = delta_t + gamma lambda A_next
// where "next" is the next valid token (0 after the last). r_t = -kl_coef K_t, plus the sample's reward at its last
// valid token. Nothing at a masked position is read into an advantage. returns_t = A_t + V_t (at a masked position: the
// carried A plus its own V). With lambda_value given, returns come from their own pass with that lambda (VAPO).
#pragma once
#include "kernels/reinforce_plus_plus.h"

namespace nemo_rl::kernels {

struct GaeConfig {
  double gamma = 1.0;
  double lambda = 0.95;        ///< of the advantages
  double lambda_value = 0.95;  ///< of the returns; read if `decoupled`
  bool decoupled = false;
  double length_adaptive_alpha = 0.0;  ///< > 0: the advantages' lambda of a row is clamp(1 - 1 / max(alpha * length,
                                       ///< 1), 0, 1)
  double kl_coef = 0.0;                ///< 0 reads no log-probs
  KlEstimator kl_type = KlEstimator::k3;
};

template <class T>
struct GaeArgs {
  std::int64_t num_rows = 0;
  std::int64_t num_tokens = 0;
  const T* rewards = nullptr;  ///< [B]
  MatrixView<T> values, mask, logprobs, reference;
  T* advantages = nullptr;                ///< [B, S] contiguous; 0 at masked positions
  T* returns = nullptr;                   ///< [B, S] contiguous
  const std::int64_t* offsets = nullptr;  ///< without padding (kernels/token_rows.h); the CPU alone
};

/// The running state of one row (or of several, where D is a vector), in double whatever T is.
template <class D>
struct GaeCarryOf {
  D next_value{};
  D advantage{};
  D value_advantage{};  ///< of the returns' pass
};
using GaeCarry = GaeCarryOf<double>;

template <class D>
NRL_INLINE GaeCarryOf<D> gae_step_of(const GaeCarryOf<D>& c, D reward, D value, double gamma, D decay,
                                     double decay_value) {
  const D delta = reward + gamma * c.next_value - value;
  return {value, delta + decay * c.advantage, delta + decay_value * c.value_advantage};
}
NRL_INLINE GaeCarry gae_step(const GaeCarry& c, double reward, double value, double gamma, double decay,
                             double decay_value) {
  return gae_step_of<double>(c, reward, value, gamma, decay, decay_value);
}

NRL_INLINE double gae_row_lambda(const GaeConfig& c, double length) {
  if (!(c.length_adaptive_alpha > 0)) return c.lambda;
  const double scaled = c.length_adaptive_alpha * length;
  const double lambda = 1.0 - 1.0 / (scaled < 1.0 ? 1.0 : scaled);
  return lambda < 0.0 ? 0.0 : (lambda > 1.0 ? 1.0 : lambda);
}

template <class T>
using GaeKernel = void(const GaeArgs<T>&, const GaeConfig&, std::int64_t begin, std::int64_t end);
NRL_DECLARE_CPU_KERNEL(gae_f32, GaeKernel<float>);
NRL_DECLARE_CPU_KERNEL(gae_f64, GaeKernel<double>);

}  // namespace nemo_rl::kernels
