// The clipped policy-gradient loss of sixteen tokens: what they read, and the terms that kernels/clipped_pg_loss.h
// makes of it. Part of clipped_pg_loss.cpp.
#pragma once
#include "kernels/clipped_pg_loss.h"
#include "kernels/cpu/vec.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// What is known of a row before its tokens are visited.
template <class T>
struct RowContext {
  T weight = 0;          ///< of a token's loss in the row's sum: sample_mask, or sample_mask / tokens of the row
  T grad_weight = 0;     ///< the same times the outer reciprocal count
  T inverse_length = 0;  ///< 1 / (sum of the token mask + 1e-8)
  T ratio = 1;           ///< GSPO, GMPO: the row's R
  T importance = 1;      ///< the row's W, where it has one (finite, before truncation)
  T kept = 1;            ///< seq-mask-tis: 1 if the row's geometric mean is inside the bounds
  T nll_weight = 0;      ///< gradient of the NLL term a token; 0 unless the reward is positive
  RowWeights<T> vespo = {T(1), T(1)};
};

/// One row: its arrays from its first token on, and what is known of it before its tokens are visited.
template <class T>
struct Row {
  std::int64_t num_tokens = 0;
  const T *curr, *advantages, *prev, *generation, *reference, *unfiltered, *token_mask, *penalty;  ///< null: not read
  T *grad, *grad_unfiltered;
  T sample_mask = 0;
  T lo = 0, hi = 0;  ///< bounds of the ratio
  RowContext<T> known;
};

/// Sixteen tokens: inputs, 0 at masked positions.
template <class P>
struct Tokens {
  P x, prev, gen, adv, mask, ref, unf, penalty;
};

/// What they add to the sums.
template <class P>
struct LossTerms {
  P ratio, clamped, loss, grad;
  P weight, oob, x_over_gen;
  MismatchTerm<P> mismatch;
  P kl, kl_grad;
};

constexpr int kPrefetchBytes = 2048;  ///< how far ahead of their use a row's arrays are fetched

template <class T>
NRL_INLINE Vec<T> load(const Row<T>& row, const T* from, std::int64_t t) {
  __builtin_prefetch(reinterpret_cast<const char*>(from + t) + kPrefetchBytes);
  const std::int64_t left = row.num_tokens - t;
  return left >= kLanes ? load<Vec<T>>(from + t) : load<Vec<T>>(from + t, static_cast<int>(left));
}

template <class T>
NRL_INLINE void store(const Row<T>& row, T* to, std::int64_t t, Vec<T> v) {
  const std::int64_t left = row.num_tokens - t;
  if (left >= kLanes) store(to + t, v);
  else store(to + t, v, static_cast<int>(left));
}

template <class T>
NRL_INLINE Tokens<Vec<T>> load_tokens(const Row<T>& row, const ClippedPGConfig& c, std::int64_t t) {
  Vec<T> mask = load(row, row.token_mask, t), zero(0);
  const auto valid = mask != zero;
  Tokens<Vec<T>> k;
  k.mask = mask * Vec<T>(row.sample_mask);
  k.x = select(valid, load(row, row.curr, t), zero);
  k.adv = select(valid, load(row, row.advantages, t), zero);
  k.gen = select(valid, load(row, row.generation, t), zero);
  k.prev = c.ratio_mode == RatioMode::on_policy ? k.x : select(valid, load(row, row.prev, t), zero);
  k.ref = c.kl_penalty != 0 ? select(valid, load(row, row.reference, t), zero) : zero;
  k.unf = row.unfiltered ? select(valid, load(row, row.unfiltered, t), zero) : k.x;
  k.penalty = c.ratio_mode == RatioMode::kl_cov ? select(valid, load(row, row.penalty, t), zero) : zero;
  return k;
}

/// log v, lane by lane.
template <class T>
[[gnu::noinline]] Vec<T> log_of(Vec<T> v) {
  T lanes[kLanes];
  store(lanes, v);
  for (T& lane : lanes) lane = kernels::log_of(lane);
  return load<Vec<T>>(lanes);
}

template <class T, class P = Vec<T>>
NRL_INLINE PolicyTerm<P> policy_terms(const Row<T>& row, const ClippedPGConfig& c, const Tokens<P>& k) {
  P lo(row.lo), hi(row.hi);
  if (!grouped_ratio(c)) {
    const RowWeights<P> vespo = {P(row.known.vespo.positive), P(row.known.vespo.negative)};
    return token_term(c, k.x, k.prev, k.adv, lo, hi, vespo, k.penalty);
  }
  P ratio = select(k.mask != P(0), P(row.known.ratio), P(0));  // a row's ratio may be infinite, and 0 * inf is NaN
  return grouped_term(c, k.adv, ratio, lo, hi);
}

template <class P>
[[gnu::noinline, gnu::cold]] MismatchTerm<P> far_mismatch_terms(KlEstimator type, P prev, P gen) {
  MismatchTerm<P> far = mismatch_term(type, prev, gen), near = near_mismatch_term(type, prev, gen);
  const auto is_near = abs_of(prev - gen) < P(0.5);
  return {select(is_near, near.importance, far.importance), select(is_near, near.mult_prob_error, far.mult_prob_error),
          select(is_near, near.gen_kl, far.gen_kl), select(is_near, near.policy_kl, far.policy_kl),
          select(is_near, near.js, far.js)};
}

/// a where `is_a`, e^x elsewhere
template <class P, class M>
[[gnu::noinline, gnu::cold]] P exp_unless(M is_a, P a, P x) {
  return select(is_a, a, exp_of(x));
}

/// Where all sixteen gaps are small no exponential is taken; e^(x - generation) is then the ratio times e^(prev -
/// generation). A token's result depends on its own gap alone.
template <class T, class P = Vec<T>>
NRL_INLINE void mismatch_terms(const ClippedPGConfig& c, const Tokens<P>& k, LossTerms<P>& out) {
  P gap = abs_of(k.prev - k.gen), one(1);
  if (sizeof(T) == 8) {
    out.mismatch = mismatch_term(c.kl_type, k.prev, k.gen);
    out.x_over_gen = exp_of(k.x - k.gen);
  } else {
    const auto near = gap < P(0.5);
    out.mismatch = near_mismatch_term(c.kl_type, k.prev, k.gen);
    out.x_over_gen = out.ratio * out.mismatch.importance;
    if (!__builtin_expect(all_of(near), 1)) {
      out.mismatch = far_mismatch_terms(c.kl_type, k.prev, k.gen);
      out.x_over_gen = exp_unless(near, out.x_over_gen, k.x - k.gen);
    }
    if (c.ratio_mode == RatioMode::reinforce || grouped_ratio(c)) out.x_over_gen = exp_of(k.x - k.gen);
  }
  // a fractional mask scales the gap inside the exponent too
  if (!__builtin_expect(all_of((k.mask == one) | (k.mask == P(0))), 1))
    out.mismatch.mult_prob_error = exp_unless(k.mask == one, out.mismatch.mult_prob_error, gap * k.mask);
}

template <class T, class P = Vec<T>>
NRL_INLINE void importance_terms(const Row<T>& row, const ClippedPGConfig& c, LossTerms<P>& out) {
  P raw = row_importance(c) ? P(row.known.importance) : out.mismatch.importance;
  TruncatedWeight<P> w = truncate_importance(c.importance_sampling, raw, P(c.importance_min), P(c.importance_max));
  out.weight = c.importance_sampling == ImportanceSampling::seq_mask_tis ? w.weight * P(row.known.kept) : w.weight;
  out.oob = w.out_of_bounds;
  if (!corrected(c)) return;
  out.loss = out.loss * out.weight;
  out.grad = select(out.grad == P(0), P(0), out.grad * out.weight);
}

template <class T, class P = Vec<T>>
NRL_INLINE void kl_terms(const Row<T>& row, const ClippedPGConfig& c, const Tokens<P>& k, LossTerms<P>& out) {
  out.kl = out.kl_grad = P(0);
  if (c.kl_penalty == 0) return;
  P weight = select(is_finite(k.unf), P(1), P(0));
  if (c.use_on_policy_kl_approximation)
    weight = finite_or_zero(row.unfiltered ? exp_of(k.unf - k.gen) : out.x_over_gen);
  KlTerm<P> kl = kl_term(c.kl_type, k.unf, k.ref, weight, P(c.kl_input_clamp), P(c.kl_output_clamp));
  out.kl = kl.value;
  out.kl_grad = kl.d_logprob;
}

template <class T, class P = Vec<T>>
NRL_INLINE LossTerms<P> terms_of(const Row<T>& row, const ClippedPGConfig& c, const Tokens<P>& k) {
  PolicyTerm<P> p = policy_terms(row, c, k);
  LossTerms<P> out;
  out.ratio = p.ratio, out.clamped = p.clamped, out.loss = p.loss, out.grad = p.grad;
  mismatch_terms<T>(c, k, out);
  importance_terms(row, c, out);
  kl_terms(row, c, k, out);
  return out;
}

}  // namespace
}  // namespace nemo_rl::kernels::NRL_CAPABILITY
