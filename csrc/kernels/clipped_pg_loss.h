// Clipped policy-gradient loss: value, gradient and every metric in one pass over the tokens.
//
//   loss = reduce(W_t * C_t) + beta * reduce(K_t) + mu * NLL      C_t = max(-A_t R_t, -A_t clamp(R_t))
//
// B sequences, N = S - 1 predicted tokens. All per-token arrays are [B, N] (already shifted); M_t = token_mask_t *
// sample_mask. reduce is sum(v M) / (global tokens) for a token-level loss, and for a sequence-level one the mean over
// a row's token mask, then sum over sample_mask / (global sequences). Positions with mask 0 are never read into a sum.
#pragma once
#include <cstdint>

#include "common/cpu_capability.h"
#include "kernels/kl.h"
#include "kernels/matrix_view.h"

namespace nemo_rl::kernels {

enum class RatioMode {
  ppo = 0,        ///< R = e^(x - prev), clipped
  reinforce = 1,  ///< R = x, no ratio
  cispo = 2,      ///< C = -A sg(clamp(R)) x
  on_policy = 3,  ///< R = e^(x - sg(x)) = 1; prev is x itself
};

enum class ImportanceSampling {
  none = 0,          ///< W = 1
  full = 1,          ///< W = e^(prev - generation)
  tis = 2,           ///< W clamped to [min, max]
  icepop = 3,        ///< W zeroed outside [min, max]
  seq_mask_tis = 4,  ///< whole rows zeroed whose geometric mean of W is outside [min, max]
};

struct ClippedPGConfig {
  RatioMode ratio_mode = RatioMode::ppo;
  bool token_level_loss = true;
  bool sequence_level_ratios = false;  ///< GSPO: one ratio, and one W, a row
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
  double importance_min = 0.0;
  double importance_max = 0.0;
  double positive_nll_weight = 0.0;  ///< mu; acts when rewards are given
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

/// The term of one token from its own log-probs (everything but GSPO's ratio of a whole row).
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
  metrics[kSamplingImportanceRatio] =
      sum[kImportance] * (config.sequence_level_ratios ? weights.sequence : weights.token);
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
