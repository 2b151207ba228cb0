#include "kernels/clipped_pg_loss.h"

#include "kernels/cpu/lanes.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// What is known of a row before its tokens are visited.
template <class T>
struct RowContext {
  T weight = 0;          ///< of a token's loss in the row's sum: sample_mask, or sample_mask / tokens of the row
  T grad_weight = 0;     ///< the same times the outer reciprocal count
  T inverse_length = 0;  ///< 1 / (sum of the token mask + 1e-8)
  T ratio = 1;           ///< GSPO: the row's R
  T importance = 1;      ///< GSPO: the row's W (finite, before truncation)
  T kept = 1;            ///< seq-mask-tis: 1 if the row's geometric mean is inside the bounds
  T nll_weight = 0;      ///< gradient of the NLL term a token; 0 unless the reward is positive
};

/// One tile of a row: inputs (0 at masked positions) and what the stages make of them.
template <class T>
struct Tile {
  alignas(64) T x[kTile], prev[kTile], gen[kTile], adv[kTile], mask[kTile], ref[kTile], unf[kTile];
  alignas(64) T ratio[kTile], clamped[kTile], loss[kTile], grad[kTile], weight[kTile], oob[kTile];
  alignas(64) T mult[kTile], gen_kl[kTile], policy_kl[kTile], js[kTile], importance_gen[kTile], entropy[kTile];
  alignas(64) T kl[kTile], kl_grad[kTile];
  int n = 0;       ///< tokens
  int padded = 0;  ///< tokens rounded up to whole lane groups
};

template <class T>
class RowWorker {
 public:
  RowWorker(const ClippedPGArgs<T>& args, const ClippedPGConfig& config)
      : a_(args),
        c_(config),
        weights_(loss_weights<T>(args.counts)),
        lo_(static_cast<T>(1.0 - config.ratio_clip_min)),
        hi_(static_cast<T>(1.0 + config.ratio_clip_max)) {}

  void run(std::int64_t b, double* row) {
    b_ = b;
    row_ = row;
    for (int i = 0; i < kPGRowSize; ++i) row[i] = merge_identity(clipped_pg_merge(i));
    sample_ = a_.sample_mask[b];
    row[kValidSamples] = sample_;
    T* grad = a_.grad + b * a_.num_tokens;
    T* grad_unfiltered = a_.grad_unfiltered ? a_.grad_unfiltered + b * a_.num_tokens : nullptr;
    if (sample_ == T(0)) {
      for (std::int64_t t = 0; t < a_.num_tokens; ++t) grad[t] = 0;
      for (std::int64_t t = 0; grad_unfiltered && t < a_.num_tokens; ++t) grad_unfiltered[t] = 0;
      return;
    }
    prepare();
    slope_sum_ = 0;
    for (std::int64_t t = 0; t < a_.num_tokens; t += kTile) {
      load(t);
      policy_stage();
      mismatch_stage();
      importance_stage();
      kl_stage();
      reduce();
      store(t, grad + t, grad_unfiltered ? grad_unfiltered + t : nullptr);
    }
    if (grouped_ratio()) spread_row_gradient(grad);
    if (c_.sequence_level_ratios) row[kImportance] = static_cast<double>(row_weight_) * sample_;
    if (c_.importance_sampling == ImportanceSampling::seq_mask_tis) row[kOutOfBounds] = (1.0 - ctx_.kept) * sample_;
  }

 private:
  /// GSPO's one ratio a row; on-policy and REINFORCE terms stay per token.
  bool grouped_ratio() const { return c_.sequence_level_ratios && c_.ratio_mode == RatioMode::ppo; }
  bool needs_row_pass() const {
    return c_.sequence_level_ratios || !c_.token_level_loss ||
           c_.importance_sampling == ImportanceSampling::seq_mask_tis;
  }

  void prepare() {
    ctx_ = {};
    ctx_.weight = 1;
    if (a_.rewards && c_.positive_nll_weight > 0 && a_.rewards[b_] > T(0))
      ctx_.nll_weight = static_cast<T>(c_.positive_nll_weight * weights_.positive_token);
    if (needs_row_pass()) row_pass();
    ctx_.grad_weight = static_cast<T>(ctx_.weight * (c_.token_level_loss ? weights_.token : weights_.sequence));
    row_weight_ = truncate_importance(c_.importance_sampling, ctx_.importance, static_cast<T>(c_.importance_min),
                                      static_cast<T>(c_.importance_max))
                      .weight *
                  ctx_.kept;
  }

  /// Sums over the whole row that its tokens need: its length, its mean log ratio, its log importance weight.
  void row_pass() {
    double length = 0, log_ratio = 0, log_importance = 0, finite_log_importance = 0;
    alignas(64) T d[kTile];
    for (std::int64_t t = 0; t < a_.num_tokens; t += kTile) {
      load(t);
      for (int i = 0; i < tile_.padded; ++i) tile_.mask[i] = i < tile_.n ? a_.token_mask.row(b_)[t + i] : T(0);
      length += lane_sum(tile_.mask, tile_.padded);
      for (int i = 0; i < tile_.padded; ++i) d[i] = tile_.x[i] - tile_.prev[i];
      log_ratio += lane_dot(d, tile_.mask, tile_.padded);
      for (int i = 0; i < tile_.padded; ++i) d[i] = tile_.prev[i] - tile_.gen[i];
      log_importance += lane_dot(d, tile_.mask, tile_.padded);
      for (int i = 0; i < tile_.padded; ++i) d[i] = finite_or_zero(d[i]);
      finite_log_importance += lane_dot(d, tile_.mask, tile_.padded);
    }
    const double denominator = static_cast<T>(length) + static_cast<T>(1e-8);
    ctx_.inverse_length = static_cast<T>(1.0 / denominator);
    if (!c_.token_level_loss) ctx_.weight = ctx_.inverse_length;
    if (c_.sequence_level_ratios) {
      ctx_.ratio = exp_of(static_cast<T>(log_ratio / denominator));
      ctx_.importance = finite_or_zero(exp_of(static_cast<T>(log_importance * sample_)));
    }
    if (c_.importance_sampling == ImportanceSampling::seq_mask_tis) {
      const T mean = exp_of(static_cast<T>(finite_log_importance / denominator));
      ctx_.kept = mean >= static_cast<T>(c_.importance_min) && mean <= static_cast<T>(c_.importance_max) ? T(1) : T(0);
    }
  }

  void load(std::int64_t t) {
    const std::int64_t left = a_.num_tokens - t;
    const int n = tile_.n = left < kTile ? static_cast<int>(left) : kTile;
    tile_.padded = padded_to_lanes(n);
    const T* mask = a_.token_mask.row(b_) + t;
    load_masked(a_.curr.row(b_) + t, mask, n, tile_.x);
    load_masked(a_.advantages.row(b_) + t, mask, n, tile_.adv);
    load_masked(a_.generation.row(b_) + t, mask, n, tile_.gen);
    load_masked((c_.ratio_mode == RatioMode::on_policy ? a_.curr : a_.prev).row(b_) + t, mask, n, tile_.prev);
    if (c_.kl_penalty != 0) {
      load_masked(a_.reference.row(b_) + t, mask, n, tile_.ref);
      if (a_.unfiltered.data) load_masked(a_.unfiltered.row(b_) + t, mask, n, tile_.unf);
    }
    const T s = sample_;
    for (int i = 0; i < n; ++i) tile_.mask[i] = mask[i] * s;
    for (int i = n; i < tile_.padded; ++i) tile_.mask[i] = T(0);
  }

  template <RatioMode mode, bool dual>
  void policy_loop() {
    Tile<T>& t = tile_;
    const T lo = lo_, hi = hi_, c = static_cast<T>(c_.ratio_clip_c);
    for (int i = 0; i < t.padded; ++i) {
      const PolicyTerm<T> p = policy_term(mode, t.x[i], t.prev[i], t.adv[i], lo, hi, dual, c);
      t.ratio[i] = p.ratio;
      t.clamped[i] = p.clamped;
      t.loss[i] = p.loss;
      t.grad[i] = p.grad;
    }
  }

  template <RatioMode mode>
  void policy_mode() {
    if (c_.dual_clip) return policy_loop<mode, true>();
    policy_loop<mode, false>();
  }

  void grouped_policy() {
    Tile<T>& t = tile_;
    const T r = ctx_.ratio, clamped = clamp_to(r, lo_, hi_), c = static_cast<T>(c_.ratio_clip_c);
    const bool in_range = r >= lo_ && r <= hi_, dual = c_.dual_clip;
    for (int i = 0; i < t.padded; ++i) {
      const PolicyTerm<T> p = clipped_term(t.adv[i], r, clamped, in_range, r, dual, c);
      t.ratio[i] = r;
      t.clamped[i] = clamped;
      t.loss[i] = p.loss;
      t.grad[i] = p.grad;
    }
  }

  void policy_stage() {
    if (grouped_ratio()) return grouped_policy();
    switch (c_.ratio_mode) {
      case RatioMode::ppo:
        return policy_mode<RatioMode::ppo>();
      case RatioMode::reinforce:
        return policy_mode<RatioMode::reinforce>();
      case RatioMode::cispo:
        return policy_mode<RatioMode::cispo>();
      case RatioMode::on_policy:
        return policy_mode<RatioMode::on_policy>();
    }
  }

  template <KlEstimator type>
  void mismatch_loop() {
    Tile<T>& t = tile_;
    for (int i = 0; i < t.padded; ++i) {
      const MismatchTerm<T> m = mismatch_term(type, t.prev[i], t.gen[i]);
      t.weight[i] = m.importance;
      t.mult[i] = m.mult_prob_error;
      t.gen_kl[i] = m.gen_kl;
      t.policy_kl[i] = m.policy_kl;
      t.js[i] = m.js;
      t.importance_gen[i] = exp_of(t.x[i] - t.gen[i]);
      t.entropy[i] = t.importance_gen[i] * t.x[i];
    }
  }

  void mismatch_stage() {
    if (c_.kl_type == KlEstimator::k1) mismatch_loop<KlEstimator::k1>();
    if (c_.kl_type == KlEstimator::k2) mismatch_loop<KlEstimator::k2>();
    if (c_.kl_type == KlEstimator::k3) mismatch_loop<KlEstimator::k3>();
    for (int i = 0; i < tile_.padded; ++i) tile_.kl[i] = abs_of(tile_.mask[i] * (T(1) - tile_.mask[i]));
    if (lane_sum(tile_.kl, tile_.padded) == 0) return;
    for (int i = 0; i < tile_.padded; ++i)  // a fractional mask scales the gap inside the exponent too
      tile_.mult[i] = exp_of(abs_of(tile_.prev[i] - tile_.gen[i]) * tile_.mask[i]);
  }

  template <ImportanceSampling mode>
  void importance_loop() {
    Tile<T>& t = tile_;
    const T lo = static_cast<T>(c_.importance_min), hi = static_cast<T>(c_.importance_max), kept = ctx_.kept;
    for (int i = 0; i < t.padded; ++i) {
      const TruncatedWeight<T> w = truncate_importance(mode, t.weight[i], lo, hi);
      t.weight[i] = w.weight * kept;
      t.oob[i] = w.out_of_bounds;
    }
  }

  void importance_stage() {
    if (c_.sequence_level_ratios)
      for (int i = 0; i < tile_.padded; ++i) tile_.weight[i] = ctx_.importance;
    switch (c_.importance_sampling) {
      case ImportanceSampling::tis:
        return importance_loop<ImportanceSampling::tis>();
      case ImportanceSampling::icepop:
        return importance_loop<ImportanceSampling::icepop>();
      default:
        return importance_loop<ImportanceSampling::full>();
    }
  }

  /// The weight of the KL term, into `importance_gen`, which holds e^(x - generation) so far.
  template <bool unfiltered>
  void kl_weights() {
    Tile<T>& t = tile_;
    if (!c_.use_on_policy_kl_approximation) {
      for (int i = 0; i < t.padded; ++i) {
        const T u = unfiltered ? t.unf[i] : t.x[i];
        t.importance_gen[i] = finite_or_zero(T(1) + (u - u));
      }
    } else {
      for (int i = 0; i < t.padded; ++i)
        t.importance_gen[i] = finite_or_zero(unfiltered ? exp_of(t.unf[i] - t.gen[i]) : t.importance_gen[i]);
    }
  }

  template <KlEstimator type, bool unfiltered>
  void kl_loop() {
    Tile<T>& t = tile_;
    const T in = static_cast<T>(c_.kl_input_clamp), out = static_cast<T>(c_.kl_output_clamp);
    kl_weights<unfiltered>();
    for (int i = 0; i < t.padded; ++i) {
      const KlTerm<T> k = kl_term(type, unfiltered ? t.unf[i] : t.x[i], t.ref[i], t.importance_gen[i], in, out);
      t.kl[i] = k.value;
      t.kl_grad[i] = k.d_logprob;
    }
  }

  template <KlEstimator type>
  void kl_type() {
    if (a_.unfiltered.data) return kl_loop<type, true>();
    kl_loop<type, false>();
  }

  void kl_stage() {
    if (c_.kl_penalty == 0) return;
    if (c_.kl_type == KlEstimator::k1) kl_type<KlEstimator::k1>();
    if (c_.kl_type == KlEstimator::k2) kl_type<KlEstimator::k2>();
    if (c_.kl_type == KlEstimator::k3) kl_type<KlEstimator::k3>();
  }

  bool corrected() const { return c_.importance_sampling != ImportanceSampling::none; }

  void reduce() {
    Tile<T>& t = tile_;
    const int n = t.padded;
    const double weight = ctx_.weight;
    if (corrected()) {
      for (int i = 0; i < n; ++i) t.loss[i] *= t.weight[i];
      for (int i = 0; i < n; ++i) t.grad[i] = t.grad[i] == T(0) ? T(0) : t.grad[i] * t.weight[i];
    }
    row_[kActor] += lane_dot(t.loss, t.mask, n) * weight;
    row_[kRatio] += lane_dot(t.ratio, t.mask, n);
    row_[kRatioClamped] += lane_dot(t.clamped, t.mask, n);
    lane_extrema(t.ratio, t.mask, n, row_[kRatioMin], row_[kRatioMax]);
    lane_extrema(t.clamped, t.mask, n, row_[kClampedMin], row_[kClampedMax]);
    row_[kMultProbError] += lane_dot(t.mult, t.mask, n);
    row_[kGenKl] += lane_dot(t.gen_kl, t.mask, n);
    row_[kPolicyKl] += lane_dot(t.policy_kl, t.mask, n);
    row_[kJs] += lane_dot(t.js, t.mask, n);
    row_[kImportance] += lane_dot(t.weight, t.mask, n);
    row_[kEntropy] += lane_dot(t.entropy, t.mask, n);
    row_[kOutOfBounds] += lane_dot(t.oob, t.mask, n);
    if (c_.kl_penalty != 0) row_[kKl] += lane_dot(t.kl, t.mask, n) * weight;
    if (ctx_.nll_weight != T(0)) row_[kNll] -= lane_dot(t.x, t.mask, n);
    if (grouped_ratio()) slope_sum_ += lane_dot(t.grad, t.mask, n);
  }

  /// The gradient of the tile; GSPO's actor part follows when the row's sum is known.
  void store(std::int64_t start, T* __restrict grad, T* __restrict grad_unfiltered) {
    Tile<T>& t = tile_;
    const T actor = grouped_ratio() ? T(0) : ctx_.grad_weight, nll = ctx_.nll_weight;
    const T kl = static_cast<T>(ctx_.grad_weight * c_.kl_penalty);
    const bool kl_in_grad = c_.kl_penalty != 0 && !grad_unfiltered;
    for (int i = 0; i < t.padded; ++i) t.grad[i] = t.mask[i] * (t.grad[i] * actor - nll);
    if (kl_in_grad)
      for (int i = 0; i < t.padded; ++i) t.grad[i] += t.mask[i] * (t.kl_grad[i] * kl);
    for (int i = 0; i < t.n; ++i) grad[i] = t.grad[i];
    for (int i = 0; grad_unfiltered && i < t.n; ++i)
      grad_unfiltered[i] = c_.kl_penalty != 0 ? t.mask[i] * (t.kl_grad[i] * kl) : T(0);
    note_nonfinite(start, grad_unfiltered);
  }

  /// Finds the first token whose loss or gradient is not finite; free while the tile's sums are.
  void note_nonfinite(std::int64_t start, const T* grad_unfiltered) {
    Tile<T>& t = tile_;
    double check = lane_sum(t.grad, t.padded) + row_[kActor] + row_[kKl] + row_[kNll];
    for (int i = 0; grad_unfiltered && i < t.n; ++i) check += grad_unfiltered[i];
    if (is_finite(check) || row_[kFirstBad] < HUGE_VAL) return;
    for (int i = 0; i < t.n; ++i) {
      const bool kl_bad = c_.kl_penalty != 0 && !(is_finite(t.kl[i]) && is_finite(t.kl_grad[i]));
      if (t.mask[i] != T(0) && !(is_finite(t.loss[i]) && is_finite(t.grad[i]) && is_finite(t.x[i]) && !kl_bad)) {
        row_[kFirstBad] = static_cast<double>(b_ * a_.num_tokens + start + i);
        return;
      }
    }
  }

  /// GSPO: d(log R)/dx_t = token_mask_t / (length + 1e-8), the same slope for the whole row.
  void spread_row_gradient(T* __restrict grad) {
    const T slope = static_cast<T>(slope_sum_ * ctx_.grad_weight * ctx_.inverse_length);
    const T* mask = a_.token_mask.row(b_);
    for (std::int64_t t = 0; t < a_.num_tokens; ++t) grad[t] += mask[t] != T(0) ? mask[t] * slope : T(0);
    if (!is_finite(slope) && !(row_[kFirstBad] < HUGE_VAL)) row_[kFirstBad] = static_cast<double>(b_ * a_.num_tokens);
  }

  const ClippedPGArgs<T>& a_;
  const ClippedPGConfig& c_;
  const LossWeights weights_;
  const T lo_, hi_;
  std::int64_t b_ = 0;
  double* row_ = nullptr;
  double slope_sum_ = 0;
  T sample_ = 0, row_weight_ = 1;
  RowContext<T> ctx_;
  Tile<T> tile_;
};

template <class T>
void run_rows(const ClippedPGArgs<T>& args, const ClippedPGConfig& config, std::int64_t begin, std::int64_t end,
              double* rows) {
  RowWorker<T> worker(args, config);
  for (std::int64_t b = begin; b < end; ++b) worker.run(b, rows + b * kPGRowSize);
}

}  // namespace

void clipped_pg_loss_f32(const ClippedPGArgs<float>& args, const ClippedPGConfig& config, std::int64_t begin,
                         std::int64_t end, double* rows) {
  run_rows(args, config, begin, end, rows);
}
void clipped_pg_loss_f64(const ClippedPGArgs<double>& args, const ClippedPGConfig& config, std::int64_t begin,
                         std::int64_t end, double* rows) {
  run_rows(args, config, begin, end, rows);
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
