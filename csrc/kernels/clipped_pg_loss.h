// Clipped policy-gradient loss: value, gradient and every metric in one pass over the tokens.
//
//   loss = reduce(W_t * C_t) + beta * reduce(K_t) + mu * NLL      C_t: see RatioMode
//
// B sequences, N = S - 1 predicted tokens. All per-token arrays are [B, N] (already shifted); M_t = token_mask_t *
// sample_mask. reduce is sum(v M) / (global tokens) for a token-level loss, and for a sequence-level one the mean over
// a row's token mask (or its sum over a fixed length), then sum over sample_mask / (global sequences). Positions with
// mask 0 are never read into a sum.
#pragma once
#include <cstdint>

#include "common/cpu_capability.h"
#include "kernels/kl.h"
#include "kernels/matrix_view.h"

namespace nemo_rl::kernels {

/// The policy term C of a token; R = e^(x - prev), sg stops the gradient. docs/losses.md has the papers.
enum class RatioMode {
  ppo = 0,        ///< max(-A R, -A clamp(R))
  reinforce = 1,  ///< the same with R = x
  cispo = 2,      ///< -A sg(clamp(R)) x
  on_policy = 3,  ///< the same with R = e^(x - sg(x)) = 1; prev is x itself
  sapo = 4,       ///< -A 4/tau sigmoid(tau (R - 1)), tau by the sign of A
  dppo_tv = 5,    ///< -A sg(min(R, ratio_clip_c)) x, 0 where A moves the probability beyond the bounds
  dppo_kl = 6,    ///< the same with the bounds on the KL between token and rest
  dro = 7,        ///< -(A x - dro_beta/2 (x - prev)^2)
  gmpo = 8,       ///< -A times the row's geometric mean of ratios, each clipped to e^-min .. e^max on A's side
  vespo = 9,      ///< -A sg(phi(R_row)) x, R_row the product of the row's ratios, phi = e^(lambda (1 - R)) R^k
  kl_cov = 10,    ///< -A R, and + penalty |x - prev| where a token's penalty is not 0
};

enum class ImportanceSampling {
  none = 0,          ///< W = 1
  full = 1,          ///< W = e^(prev - generation)
  tis = 2,           ///< W clamped to [min, max]
  icepop = 3,        ///< W zeroed outside [min, max]
  seq_mask_tis = 4,  ///< whole rows zeroed whose geometric mean of W is outside [min, max]
};

/// Over what W is formed: a token's own; or one for the row, the product of its tokens' or their geometric mean, with
/// the logarithm held in [-20, 20]. GSPO's and GMPO's is the product without that bound.
enum class ImportanceLevel { token = 0, sequence = 1, geometric = 2 };

struct ClippedPGConfig {
  RatioMode ratio_mode = RatioMode::ppo;
  bool token_level_loss = true;
  double fixed_length = 0.0;           ///< > 0: a row's tokens are summed and divided by this (Dr. GRPO; LUSPO: 1)
  bool sequence_level_ratios = false;  ///< GSPO, GMPO: one ratio, and one W, a row
  double ratio_clip_min = 0.2;
  double ratio_clip_max = 0.2;
  bool dual_clip = false;
  double ratio_clip_c = 0.0;
  double kl_penalty = 0.0;  ///< beta; 0 reads no reference log-probs
  KlEstimator kl_type = KlEstimator::k3;
  double kl_input_clamp = 20.0;   ///< infinite: none
  double kl_output_clamp = 10.0;  ///< infinite: none
  bool use_on_policy_kl_approximation = false;
  ImportanceSampling importance_sampling = ImportanceSampling::none;
  ImportanceLevel importance_level = ImportanceLevel::token;
  double importance_min = 0.0;
  double importance_max = 0.0;
  double positive_nll_weight = 0.0;  ///< mu; acts when rewards are given
  double sapo_temperature_pos = 1.0, sapo_temperature_neg = 1.05;
  double dro_beta = 0.1;
  double vespo_k_pos = 2.0, vespo_lambda_pos = 3.0, vespo_k_neg = 3.0, vespo_lambda_neg = 2.0;
};

/// The global counts a sum is divided by: valid tokens, valid sequences, valid tokens of samples with a positive
/// reward.
enum LossCount : int { kTokens, kSequences, kPositiveTokens, kNumLossCounts };

/// The reciprocals of the three counts.
struct LossWeights {
  double token = 0.0;
  double sequence = 0.0;
  double positive_token = 0.0;
};

template <class T>
NRL_INLINE LossWeights loss_weights(const double* counts) {
  return {reciprocal_count<T>(counts[kTokens]), reciprocal_count<T>(counts[kSequences]),
          reciprocal_count<T>(counts[kPositiveTokens])};
}

template <class T>
struct ClippedPGArgs {
  std::int64_t num_rows = 0;                                                            ///< B
  std::int64_t num_tokens = 0;                                                          ///< N
  MatrixView<T> curr, advantages, prev, generation, reference, unfiltered, token_mask;  ///< prev, reference, unfiltered
                                                                                        ///< may be null
  MatrixView<T> penalty;                                                                ///< of kl_cov, else null
  const T* sample_mask = nullptr;
  const T* rewards = nullptr;      ///< [B] or null
  T* grad = nullptr;               ///< [B, N] contiguous, written everywhere
  T* grad_unfiltered = nullptr;    ///< the same, when `unfiltered` is given
  const double* counts = nullptr;  ///< [kNumLossCounts]
};

/// What one row leaves behind: sums over its valid tokens, in double; kFirstBad is b * N + t of its first non-finite
/// term, infinite if there is none.
enum PGRow : int {
  kActor,
  kKl,
  kNll,
  kRatio,
  kRatioClamped,
  kMultProbError,
  kGenKl,
  kPolicyKl,
  kJs,
  kImportance,
  kEntropy,
  kOutOfBounds,
  kValidSamples,
  kRatioMin,
  kRatioMax,
  kClampedMin,
  kClampedMax,
  kFirstBad,
  kPGRowSize
};

/// The loss's result vector; names in clipped_pg_metric_name.
enum PGMetric : int {
  kLoss,
  kProbsRatio,
  kProbsRatioClamped,
  kProbsRatioMin,
  kProbsRatioMax,
  kProbsRatioClampedMin,
  kProbsRatioClampedMax,
  kKlPenalty,
  kTokenMultProbError,
  kGenKlError,
  kPolicyKlError,
  kJsDivergenceError,
  kSamplingImportanceRatio,
  kNumValidSamples,
  kApproxEntropy,
  kIsOobRatio,
  kPositiveNllLoss,
  kNonfiniteSample,
  kNonfiniteToken,
  kTokenMultProbErrorSum,  ///< the numerator of kTokenMultProbError
  kNumPGMetrics
};

template <class T>
struct PolicyTerm {
  T ratio, clamped;
  T loss;  ///< C
  T grad;  ///< dC / d(x), or d(log R) where R belongs to the row
};

/// C and its slope for one ratio; ties of max and min share the gradient half and half, as torch does. `dlog` is
/// dR/dx: R itself for an exponential ratio, 1 for REINFORCE.
template <class T, class Condition>
NRL_INLINE PolicyTerm<T> clipped_term(T advantage, T ratio, T clamped, Condition in_range, T dlog, bool dual, T c) {
  T plain = -advantage * ratio, clipped = -advantage * clamped;
  T loss = select(plain <= clipped, clipped, plain);
  T share = select(plain > clipped, T(1), select(plain == clipped, T(0.5), T(0)));
  T slope = share + select(in_range, T(1) - share, T(0));
  if (dual) {
    T floor = -advantage * c;
    const auto negative = advantage < T(0);
    T kept = select(loss < floor, T(1), select(loss == floor, T(0.5), T(0)));
    slope = select(negative, slope * kept, slope);
    loss = select(negative & (loss >= floor), floor, loss);
  }
  // a ratio that overflowed but is clipped away has slope 0, not 0 * inf
  T grad = select(slope == T(0), T(0), -advantage * slope * dlog);
  return {ratio, clamped, loss, grad};
}

/// SAPO: a soft gate instead of a clip. Its slope in x is 4 s (1 - s) R, at most about 1.
template <class T>
NRL_INLINE PolicyTerm<T> soft_gated_term(const ClippedPGConfig& c, T x, T prev, T advantage) {
  T tau = select(advantage > T(0), T(c.sapo_temperature_pos), T(c.sapo_temperature_neg));
  T ratio = exp_of(x - prev);
  T e = exp_of(tau * (T(1) - ratio)), s = T(1) / (T(1) + e);
  T slope = T(4) * s * s * e;  // 1 - s = s e, without its lost digits
  // where the gate is shut, the ratio may have overflowed
  return {ratio, ratio, -advantage * s * (T(4) / tau), select(slope == T(0), T(0), -advantage * slope * ratio)};
}

/// log v for 0 < v <= 1 in the precision that a bound on a divergence needs.
NRL_INLINE float log_of(float v) { return logf(v); }
NRL_INLINE double log_of(double v) { return log(v); }

/// DPPO: no gradient where the advantage moves the token's probability away from the old one beyond the bound.
template <class T>
NRL_INLINE PolicyTerm<T> divergence_masked_term(const ClippedPGConfig& c, T x, T prev, T advantage) {
  T ratio = exp_of(x - prev), p = exp_of(x), q = exp_of(prev);
  T bound = select(advantage > T(0), T(c.ratio_clip_max), T(c.ratio_clip_min));
  T moved = select(advantage > T(0), p - q, q - p);  // in the advantage's direction
  if (c.ratio_mode == RatioMode::dppo_kl) {
    // a rounded log-probability may exceed 0 a little
    T others = select(p < T(1), T(1) - p, T(0)), others_before = select(q < T(1), T(1) - q, T(0));
    T rest = log_of((others_before + T(1e-8)) / (others + T(1e-8)));
    moved = select(moved <= T(0), T(0), q * (prev - x) + others_before * rest);
  }
  T weight = c.dual_clip ? select(ratio > T(c.ratio_clip_c), T(c.ratio_clip_c), ratio) : ratio;
  weight = select(moved <= bound, -advantage * weight, T(0));
  return {ratio, ratio, select(weight == T(0), T(0), weight * x), weight};
}

/// DRO: the advantage's likelihood with a quadratic penalty on the log ratio.
template <class T>
NRL_INLINE PolicyTerm<T> quadratic_term(const ClippedPGConfig& c, T x, T prev, T advantage) {
  T gap = x - prev, beta(c.dro_beta), ratio = exp_of(gap);
  return {ratio, ratio, beta * gap * gap * T(0.5) - advantage * x, beta * gap - advantage};
}

/// KL-Cov (arXiv 2505.22617): the ratio without a clip, and the distance from the old policy at chosen tokens. The
/// distance has no slope where it is 0.
template <class T>
NRL_INLINE PolicyTerm<T> penalised_term(T x, T prev, T advantage, T penalty) {
  T gap = x - prev, ratio = exp_of(gap);
  T slope = select(gap > T(0), penalty, select(gap < T(0), -penalty, T(0)));
  T plain = select(advantage == T(0), T(0), -advantage * ratio);  // a ratio that overflowed counts nothing then
  return {ratio, ratio, plain + select(penalty == T(0), T(0), penalty * abs_of(gap)), plain + slope};
}

/// GMPO: a token's share of the row's log ratio, clipped where the advantage gains from it, and whether it has a slope.
template <class T>
struct ClippedLogRatio {
  T value;
  T slope;  ///< 1, or 0 where the clip acts or the advantage is 0
};

template <class T>
NRL_INLINE ClippedLogRatio<T> clipped_log_ratio(const ClippedPGConfig& c, T x, T prev, T advantage) {
  T gap = x - prev, clipped = clamp_to(gap, T(-c.ratio_clip_min), T(c.ratio_clip_max));
  const auto kept = select(advantage > T(0), gap, -gap) <= select(advantage > T(0), clipped, -clipped);
  T slope = select(advantage == T(0), T(0), select(kept, T(1), T(0)));
  return {select(advantage == T(0), T(0), select(kept, gap, clipped)), slope};
}

/// VESPO: what a token adds to its row's log ratio, the generator's mismatch included where W is asked for.
template <class T>
NRL_INLINE T vespo_log_ratio(const ClippedPGConfig& c, T x, T prev, T generation) {
  T gap = clamp_to(x - prev, T(-20.0), T(20.0));
  if (c.importance_sampling == ImportanceSampling::none) return gap;
  return gap + clamp_to(prev - generation, T(-18.420680743952367), T(20.0));
}

/// VESPO: phi of a row's ratio, whose logarithm is given, for advantages of either sign.
template <class T>
struct RowWeights {
  T positive, negative;
};

template <class T>
NRL_INLINE RowWeights<T> vespo_weights(const ClippedPGConfig& c, double log_ratio) {
  const double log_w = clamp_to(log_ratio, -18.420680743952367, 20.0);  // log 1e-8
  const double w = exp_of(log_w);
  return {static_cast<T>(exp_of(c.vespo_lambda_pos * (1.0 - w) + c.vespo_k_pos * log_w)),
          static_cast<T>(exp_of(c.vespo_lambda_neg * (1.0 - w) + c.vespo_k_neg * log_w))};
}

template <class T>
NRL_INLINE PolicyTerm<T> row_weighted_term(T x, T prev, T advantage, RowWeights<T> row) {
  T ratio = exp_of(x - prev), weight = -advantage * select(advantage >= T(0), row.positive, row.negative);
  return {ratio, ratio, weight * x, weight};
}

/// The term of one token from its own log-probs (everything but a ratio or a weight of a whole row).
template <class T>
NRL_INLINE PolicyTerm<T> policy_term(RatioMode mode, T x, T prev, T advantage, T lo, T hi, bool dual, T c) {
  if (mode == RatioMode::reinforce) return clipped_term(advantage, x, x, true, T(1), dual, c);
  if (mode == RatioMode::on_policy) {
    T one = T(1) + (x - x);
    return clipped_term(advantage, one, one, true, one, dual, c);
  }
  T ratio = exp_of(x - prev);
  T clamped = clamp_to(ratio, lo, hi);
  if (mode == RatioMode::cispo) {
    T weight = -advantage * clamped;
    return {ratio, clamped, weight * x, weight};
  }
  return clipped_term(advantage, ratio, clamped, (ratio >= lo) & (ratio <= hi), ratio, dual, c);
}

/// The term of one token whose ratio is its own; `row`: VESPO's weights; `penalty`: KL-Cov's.
template <class T>
NRL_INLINE PolicyTerm<T> token_term(const ClippedPGConfig& c, T x, T prev, T advantage, T lo, T hi, RowWeights<T> row,
                                    T penalty) {
  if (c.ratio_mode == RatioMode::sapo) return soft_gated_term(c, x, prev, advantage);
  if (c.ratio_mode == RatioMode::dppo_tv || c.ratio_mode == RatioMode::dppo_kl)
    return divergence_masked_term(c, x, prev, advantage);
  if (c.ratio_mode == RatioMode::dro) return quadratic_term(c, x, prev, advantage);
  if (c.ratio_mode == RatioMode::vespo) return row_weighted_term(x, prev, advantage, row);
  if (c.ratio_mode == RatioMode::kl_cov) return penalised_term(x, prev, advantage, penalty);
  return policy_term(c.ratio_mode, x, prev, advantage, lo, hi, c.dual_clip, T(c.ratio_clip_c));
}

/// The term of one token whose ratio is the row's; its slope is that in the logarithm of the ratio.
template <class T>
NRL_INLINE PolicyTerm<T> grouped_term(const ClippedPGConfig& c, T advantage, T ratio, T lo, T hi) {
  if (c.ratio_mode == RatioMode::gmpo) {
    T loss = select(advantage == T(0), T(0), -advantage * ratio);
    return {ratio, ratio, loss, loss};
  }
  const auto in_range = (ratio >= lo) & (ratio <= hi);
  return clipped_term(advantage, ratio, clamp_to(ratio, lo, hi), in_range, ratio, c.dual_clip, T(c.ratio_clip_c));
}

/// How far the trainer's log-prob p of a token is from the generator's g.
template <class T>
struct MismatchTerm {
  T importance;       ///< e^(p - g), 0 where not finite
  T mult_prob_error;  ///< e^|p - g|
  T gen_kl, policy_kl;
  T js;  ///< log cosh((p - g) / 2), which is what the Jensen-Shannon estimate comes to
};

template <class T>
NRL_INLINE MismatchTerm<T> mismatch_term(KlEstimator type, T prev, T generation) {
  T d = prev - generation;
  T a = abs_of(d);
  T e = exp_of(a), w = T(1) / e;
  T k3 = exp_minus_linear(a, e);
  MismatchTerm<T> out;
  out.importance = finite_or_zero(select(d > T(0), e, w));
  out.mult_prob_error = e;
  out.js = log_cosh_half(a, w, k3);
  if (type == KlEstimator::k3) {
    T k3_negative = exp_minus_linear(-a, w);
    out.gen_kl = select(d > T(0), k3, k3_negative);
    out.policy_kl = select(d > T(0), k3_negative, k3);
  } else {
    out.gen_kl = kl_estimate(type, d).value;
    out.policy_kl = kl_estimate(type, -d).value;
  }
  // a gap that is not a number belongs to neither side
  out.gen_kl = select(d == d, out.gen_kl, d);
  out.policy_kl = select(d == d, out.policy_kl, d);
  return out;
}

/// mismatch_term in single precision where |prev - generation| < 1/2, which a generator that runs the trainer's weights
/// never leaves: series in d and d^2, without an exponential or a division. Exactly 1 and 0 where both are equal.
template <class T>
NRL_INLINE MismatchTerm<T> near_mismatch_term(KlEstimator type, T prev, T generation) {
  T d = prev - generation, a = abs_of(d), z = d * d;
  // e^d - 1 - d = z (even + d odd)
  T even = mul_add(mul_add(mul_add(z, T(1.0 / 40320), T(1.0 / 720)), z, T(1.0 / 24)), z, T(0.5));
  T odd = mul_add(mul_add(mul_add(z, T(1.0 / 362880), T(1.0 / 5040)), z, T(1.0 / 120)), z, T(1.0 / 6));
  T k3 = z * mul_add(d, odd, even), k3_negative = z * mul_add(-d, odd, even);
  MismatchTerm<T> out;
  out.importance = T(1) + (d + k3);
  out.mult_prob_error = T(1) + (a + z * mul_add(a, odd, even));
  // log cosh(d / 2)
  T js = mul_add(z, T(31.0 / 14515200), T(-17.0 / 645120));
  js = mul_add(js, z, T(1.0 / 2880));
  js = mul_add(js, z, T(-1.0 / 192));
  out.js = z * mul_add(js, z, T(0.125));
  out.gen_kl = type == KlEstimator::k3 ? k3 : kl_estimate(type, d).value;
  out.policy_kl = type == KlEstimator::k3 ? k3_negative : kl_estimate(type, -d).value;
  return out;
}

template <class T>
struct TruncatedWeight {
  T weight;
  T out_of_bounds;  ///< 1 where the bound acted
};

/// tis clamps, icepop zeroes; the others leave the weight alone.
template <class T>
NRL_INLINE TruncatedWeight<T> truncate_importance(ImportanceSampling mode, T weight, T lo, T hi) {
  if (mode != ImportanceSampling::tis && mode != ImportanceSampling::icepop) return {weight, T(0)};
  const auto inside = (weight >= lo) & (weight <= hi);
  T replaced = mode == ImportanceSampling::tis ? clamp_to(weight, lo, hi) : T(0);
  return {select(inside, weight, replaced), select(inside, T(0), T(1))};
}

/// One ratio a row: GSPO's and GMPO's; on-policy and REINFORCE terms stay per token.
NRL_INLINE bool grouped_ratio(const ClippedPGConfig& c) {
  return c.sequence_level_ratios && (c.ratio_mode == RatioMode::ppo || c.ratio_mode == RatioMode::gmpo);
}

/// One W a row.
NRL_INLINE bool row_importance(const ClippedPGConfig& c) {
  return c.sequence_level_ratios || c.importance_level != ImportanceLevel::token;
}

/// A row's W before truncation, from the sum of its tokens' logarithms and its number of tokens.
template <class T>
NRL_INLINE T importance_of_row(const ClippedPGConfig& c, double log_sum, double tokens, T sample_mask) {
  if (c.importance_level == ImportanceLevel::token)
    return finite_or_zero(exp_of(static_cast<T>(log_sum * sample_mask)));
  const double log_w = c.importance_level == ImportanceLevel::geometric ? log_sum / tokens : log_sum;
  return exp_of(static_cast<T>(clamp_to(log_w, -20.0, 20.0)));
}

/// A weight W multiplies the term; VESPO has it inside phi.
NRL_INLINE bool corrected(const ClippedPGConfig& c) {
  return c.importance_sampling != ImportanceSampling::none && c.ratio_mode != RatioMode::vespo;
}

NRL_INLINE bool needs_row_pass(const ClippedPGConfig& c) {
  return row_importance(c) || !c.token_level_loss || c.ratio_mode == RatioMode::vespo ||
         c.importance_sampling == ImportanceSampling::seq_mask_tis;
}

/// Which token made a row's ratio what it is where that is not finite: the first valid one whose log ratio is not, else
/// the first valid one.
template <class T>
NRL_INLINE std::int64_t first_bad_ratio(const T* curr, const T* prev, const T* token_mask, std::int64_t num_tokens) {
  std::int64_t first = -1;
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    if (token_mask[t] == T(0)) continue;
    if (!is_finite(curr[t] - prev[t])) return t;
    if (first < 0) first = t;
  }
  return first < 0 ? 0 : first;
}

NRL_INLINE RowMerge clipped_pg_merge(int column) {
  if (column < kRatioMin) return RowMerge::sum;
  return column == kRatioMax || column == kClampedMax ? RowMerge::max : RowMerge::min;
}

/// The loss and its metrics from the merged rows.
NRL_INLINE void clipped_pg_finalize(const double* sum, std::int64_t num_tokens, const ClippedPGConfig& config,
                                    const LossWeights& weights, double* metrics) {
  const double outer = config.token_level_loss ? weights.token : weights.sequence;
  const double kl = sum[kKl] * outer;
  const double nll = sum[kNll] * weights.positive_token;
  const bool seq_mask = config.importance_sampling == ImportanceSampling::seq_mask_tis;
  metrics[kLoss] = sum[kActor] * outer + (config.kl_penalty != 0 ? config.kl_penalty * kl : 0) +
                   (config.positive_nll_weight > 0 ? config.positive_nll_weight * nll : 0);
  metrics[kProbsRatio] = sum[kRatio] * weights.token;
  metrics[kProbsRatioClamped] = sum[kRatioClamped] * weights.token;
  metrics[kProbsRatioMin] = sum[kRatioMin];
  metrics[kProbsRatioMax] = sum[kRatioMax];
  metrics[kProbsRatioClampedMin] = sum[kClampedMin];
  metrics[kProbsRatioClampedMax] = sum[kClampedMax];
  metrics[kKlPenalty] = kl;
  metrics[kTokenMultProbError] = sum[kMultProbError] * weights.token;
  metrics[kTokenMultProbErrorSum] = sum[kMultProbError];
  metrics[kGenKlError] = sum[kGenKl] * weights.token;
  metrics[kPolicyKlError] = sum[kPolicyKl] * weights.token;
  metrics[kJsDivergenceError] = sum[kJs] * weights.token;
  metrics[kSamplingImportanceRatio] = sum[kImportance] * (row_importance(config) ? weights.sequence : weights.token);
  metrics[kNumValidSamples] = sum[kValidSamples];
  metrics[kApproxEntropy] = -sum[kEntropy] * weights.token;
  metrics[kIsOobRatio] = sum[kOutOfBounds] * (seq_mask ? weights.sequence : weights.token);
  metrics[kPositiveNllLoss] = nll;
  const bool bad = sum[kFirstBad] < HUGE_VAL;
  const double row = bad ? floor(sum[kFirstBad] / static_cast<double>(num_tokens)) : -1.0;
  metrics[kNonfiniteSample] = row;
  metrics[kNonfiniteToken] = bad ? sum[kFirstBad] - row * static_cast<double>(num_tokens) : -1.0;
}

/// Rows [begin, end): writes their gradient and `rows[b * kPGRowSize ...]`.
template <class T>
using ClippedPGKernel = void(const ClippedPGArgs<T>&, const ClippedPGConfig&, std::int64_t begin, std::int64_t end,
                             double* rows);
NRL_DECLARE_CPU_KERNEL(clipped_pg_loss_f32, ClippedPGKernel<float>);
NRL_DECLARE_CPU_KERNEL(clipped_pg_loss_f64, ClippedPGKernel<double>);

}  // namespace nemo_rl::kernels
