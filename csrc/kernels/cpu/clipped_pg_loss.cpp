#include "kernels/cpu/clipped_pg_terms.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr int kTile = 256;  ///< tokens whose sums are kept in T, lane by lane, before they go to the row's doubles

/// Sums over a tile, in the order of PGRow.
template <class P>
struct TileSums {
  P actor{0}, kl{0}, nll{0}, ratio{0}, clamped{0}, mult{0}, gen_kl{0}, policy_kl{0}, js{0}, importance{0}, entropy{0},
      oob{0}, slope{0};
  P check{0};  ///< not finite if a gradient is not
  P ratio_min{HUGE_VAL}, ratio_max{-HUGE_VAL};
};

/// A row's sums in double, lane by lane.
template <class T>
struct RowSums {
  double lane[kRatioMin][kLanes] = {};
  double slope[kLanes] = {};
  Vec<T> ratio_min{HUGE_VAL}, ratio_max{-HUGE_VAL};
};

template <class T>
NRL_INLINE void add_lanes(double* to, Vec<T> v) {
  T lanes[kLanes];
  store(lanes, v);
  for (int l = 0; l < kLanes; ++l) to[l] += static_cast<double>(lanes[l]);
}

NRL_INLINE double total(const double* lanes) {
  double sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += lanes[l];
  return sum;
}

template <class T, class P = Vec<T>>
NRL_INLINE void accumulate(const Row<T>& row, const ClippedPGConfig& c, const Tokens<P>& k, const LossTerms<P>& v,
                           TileSums<P>& s) {
  P huge(HUGE_VAL);
  const auto valid = k.mask != P(0);
  s.actor = mul_add(v.loss, k.mask, s.actor);
  s.ratio = mul_add(v.ratio, k.mask, s.ratio);
  s.clamped = mul_add(v.clamped, k.mask, s.clamped);
  s.mult = mul_add(v.mismatch.mult_prob_error, k.mask, s.mult);
  s.gen_kl = mul_add(v.mismatch.gen_kl, k.mask, s.gen_kl);
  s.policy_kl = mul_add(v.mismatch.policy_kl, k.mask, s.policy_kl);
  s.js = mul_add(v.mismatch.js, k.mask, s.js);
  s.importance = mul_add(v.weight, k.mask, s.importance);
  s.entropy = mul_add(v.x_over_gen * k.x, k.mask, s.entropy);
  P low = select(valid, v.ratio, huge), high = select(valid, v.ratio, -huge);
  s.ratio_min = select(low < s.ratio_min, low, s.ratio_min);
  s.ratio_max = select(high > s.ratio_max, high, s.ratio_max);
  if (c.kl_penalty != 0) s.kl = mul_add(v.kl, k.mask, s.kl);
  if (row.known.nll_weight != T(0)) s.nll = s.nll - k.x * k.mask;
  if (corrected(c)) s.oob = mul_add(v.oob, k.mask, s.oob);
  if (grouped_ratio(c)) s.slope = mul_add(v.grad, k.mask, s.slope);
}

/// The gradient of sixteen tokens; GSPO's actor part follows when the row's sum is known.
template <class T, class P = Vec<T>>
NRL_INLINE void store_gradient(const Row<T>& row, const ClippedPGConfig& c, std::int64_t t, const Tokens<P>& k,
                               const LossTerms<P>& v, TileSums<P>& s) {
  P grad = v.grad * P(grouped_ratio(c) ? T(0) : row.known.grad_weight);
  if (row.known.nll_weight != T(0)) grad = grad - P(row.known.nll_weight);
  P kl_weight(static_cast<T>(row.known.grad_weight * c.kl_penalty)), kl_grad = v.kl_grad * kl_weight;
  if (c.kl_penalty != 0 && !row.grad_unfiltered) grad = mul_add(v.kl_grad, kl_weight, grad);
  grad = k.mask * grad;
  store(row, row.grad, t, grad);
  s.check = s.check + grad;
  if (!row.grad_unfiltered) return;
  store(row, row.grad_unfiltered, t, k.mask * kl_grad);
  s.check = s.check + k.mask * kl_grad;
}

/// Which settings a loop is compiled for; where they are known it keeps its values in registers.
enum class Variant { any, ppo, ppo_kl, on_policy, on_policy_kl };
/// x86 without AVX2 has the one loop, with the same bits: each other one would take seconds to compile.
#if defined(__AVX2__) || defined(__aarch64__)
constexpr bool kHasVariants = true;
#else
constexpr bool kHasVariants = false;
#endif

template <class T>
Variant variant_of(const ClippedPGArgs<T>& a, const ClippedPGConfig& c) {
  const bool common = sizeof(T) == 4 && !row_importance(c) && !c.dual_clip && !corrected(c) &&
                      !c.use_on_policy_kl_approximation && c.kl_type == KlEstimator::k3 && !a.unfiltered.data &&
                      !(a.rewards && c.positive_nll_weight > 0);
  if (common && c.ratio_mode == RatioMode::ppo) return c.kl_penalty != 0 ? Variant::ppo_kl : Variant::ppo;
  if (common && c.ratio_mode == RatioMode::on_policy)
    return c.kl_penalty != 0 ? Variant::on_policy_kl : Variant::on_policy;
  return Variant::any;
}

/// The same settings, with those that the variant fixes as constants.
template <Variant variant, class T>
NRL_INLINE void fix_settings(ClippedPGConfig& c, Row<T>& row) {
  if (variant == Variant::any) return;
  c.ratio_mode = variant == Variant::ppo || variant == Variant::ppo_kl ? RatioMode::ppo : RatioMode::on_policy;
  c.sequence_level_ratios = c.dual_clip = c.use_on_policy_kl_approximation = false;
  c.importance_sampling = ImportanceSampling::none;
  c.importance_level = ImportanceLevel::token;
  c.kl_type = KlEstimator::k3;
  if (variant == Variant::ppo || variant == Variant::on_policy) c.kl_penalty = 0;
  if ((variant == Variant::ppo_kl || variant == Variant::on_policy_kl) && c.kl_penalty == 0) __builtin_unreachable();
  row.unfiltered = nullptr;
  row.grad_unfiltered = nullptr;
  row.known.nll_weight = 0;
}

template <Variant variant, class T>
[[gnu::noinline]] void visit_tile(const Row<T>& of, const ClippedPGConfig& config, std::int64_t start, std::int64_t end,
                                  TileSums<Vec<T>>& sums) {
  Row<T> row = of;
  ClippedPGConfig c = config;
  fix_settings<variant>(c, row);
  TileSums<Vec<T>> s;
  for (std::int64_t t = start; t < end; t += kLanes) {
    Tokens<Vec<T>> k = load_tokens(row, c, t);
    LossTerms<Vec<T>> v = terms_of(row, c, k);
    accumulate(row, c, k, v, s);
    store_gradient(row, c, t, k, v, s);
  }
  sums = s;
}

template <class T>
void visit_tile(Variant variant, const Row<T>& row, const ClippedPGConfig& c, std::int64_t start, std::int64_t end,
                TileSums<Vec<T>>& sums) {
  if constexpr (kHasVariants && sizeof(T) == 4) {
    if (variant == Variant::ppo) return visit_tile<Variant::ppo>(row, c, start, end, sums);
    if (variant == Variant::ppo_kl) return visit_tile<Variant::ppo_kl>(row, c, start, end, sums);
    if (variant == Variant::on_policy) return visit_tile<Variant::on_policy>(row, c, start, end, sums);
    if (variant == Variant::on_policy_kl) return visit_tile<Variant::on_policy_kl>(row, c, start, end, sums);
  }
  return visit_tile<Variant::any>(row, c, start, end, sums);
}

/// Not finite where a token's loss or gradient is not, or (in the entropy) where its log-probability is -inf, beside
/// which loss and gradient may be finite.
template <class T>
NRL_INLINE Vec<T> finite_check(const TileSums<Vec<T>>& s) {
  return s.check + s.actor + s.kl + s.nll + s.entropy;
}

/// The first token of [start, end) whose finite_check is not finite; -1 if only that of their sums is not. Gradients
/// are stored once more, as they are.
template <class T>
[[gnu::noinline, gnu::cold]] std::int64_t first_nonfinite(const Row<T>& row, const ClippedPGConfig& c,
                                                          std::int64_t start, std::int64_t end) {
  for (std::int64_t t = start; t < end; t += kLanes) {
    TileSums<Vec<T>> tokens;
    visit_tile<Variant::any>(row, c, t, t + kLanes, tokens);
    T check[kLanes];
    store(check, finite_check(tokens));
    for (int l = 0; l < kLanes; ++l)
      if (!is_finite(check[l])) return t + l;
  }
  return -1;
}

template <class T>
class RowWorker {
 public:
  RowWorker(const ClippedPGArgs<T>& args, const ClippedPGConfig& config)
      : a_(args), c_(config), weights_(loss_weights<T>(args.counts)), variant_(variant_of(args, config)) {}

  void run(std::int64_t b, double* out) {
    b_ = b;
    out_ = out;
    for (int i = 0; i < kPGRowSize; ++i) out[i] = merge_identity(clipped_pg_merge(i));
    start_row();
    out[kValidSamples] = row_.sample_mask;
    if (row_.sample_mask == T(0)) {
      for (std::int64_t t = 0; t < row_.num_tokens; ++t) row_.grad[t] = 0;
      for (std::int64_t t = 0; row_.grad_unfiltered && t < row_.num_tokens; ++t) row_.grad_unfiltered[t] = 0;
      return;
    }
    prepare();
    sums_ = {};
    for (std::int64_t t = 0; t < row_.num_tokens; t += kTile) {
      const std::int64_t end = t + kTile < row_.num_tokens ? t + kTile : row_.num_tokens;
      TileSums<Vec<T>> sums;
      visit_tile(variant_, row_, c_, t, end, sums);
      flush(sums, t, end);
    }
    finish_row();
  }

 private:
  void start_row() {
    const auto from = [&](const MatrixView<T>& view) { return view.data ? view.row(b_) : nullptr; };
    row_ = {a_.num_tokens,
            from(a_.curr),
            from(a_.advantages),
            from(a_.prev),
            from(a_.generation),
            from(a_.reference),
            c_.kl_penalty != 0 ? from(a_.unfiltered) : nullptr,
            from(a_.token_mask),
            from(a_.penalty),
            a_.grad + b_ * a_.num_tokens,
            a_.grad_unfiltered ? a_.grad_unfiltered + b_ * a_.num_tokens : nullptr,
            a_.sample_mask[b_],
            static_cast<T>(1.0 - c_.ratio_clip_min),
            static_cast<T>(1.0 + c_.ratio_clip_max),
            {}};
  }

  void prepare() {
    RowContext<T>& known = row_.known;
    known.weight = 1;
    if (a_.rewards && c_.positive_nll_weight > 0 && a_.rewards[b_] > T(0))
      known.nll_weight = static_cast<T>(c_.positive_nll_weight * weights_.positive_token);
    if (needs_row_pass(c_)) row_pass();
    known.grad_weight = static_cast<T>(known.weight * (c_.token_level_loss ? weights_.token : weights_.sequence));
  }

  /// Sums over the whole row that its tokens need: its length, its mean log ratio, its log importance weight.
  void row_pass() {
    double length[kLanes] = {}, log_ratio[kLanes] = {}, log_importance[kLanes] = {}, finite_log_importance[kLanes] = {};
    for (std::int64_t t = 0; t < row_.num_tokens; t += kLanes) {
      Tokens<Vec<T>> k = load_tokens(row_, c_, t);
      Vec<T> mask = load(row_, row_.token_mask, t), gap = k.prev - k.gen;
      add_lanes(length, mask);
      add_lanes(log_ratio, log_ratio_of(k) * mask);
      add_lanes(log_importance, gap * mask);
      add_lanes(finite_log_importance, finite_or_zero(gap) * mask);
    }
    RowContext<T>& known = row_.known;
    const double denominator = static_cast<T>(total(length)) + static_cast<T>(1e-8);
    known.inverse_length = static_cast<T>(1.0 / denominator);
    if (!c_.token_level_loss)
      known.weight = c_.fixed_length > 0 ? static_cast<T>(1.0 / c_.fixed_length) : known.inverse_length;
    if (c_.ratio_mode == RatioMode::vespo) {
      known.vespo = vespo_weights<T>(c_, total(log_ratio));
    } else if (c_.sequence_level_ratios) {
      known.ratio = exp_of(static_cast<T>(total(log_ratio) / denominator));
    }
    if (row_importance(c_))
      known.importance = importance_of_row(c_, total(log_importance), denominator, row_.sample_mask);
    if (c_.importance_sampling == ImportanceSampling::seq_mask_tis) {
      const T mean = exp_of(static_cast<T>(total(finite_log_importance) / denominator));
      known.kept = mean >= static_cast<T>(c_.importance_min) && mean <= static_cast<T>(c_.importance_max) ? T(1) : T(0);
    }
  }

  /// What a token adds to its row's log ratio.
  Vec<T> log_ratio_of(const Tokens<Vec<T>>& k) const {
    if (c_.ratio_mode == RatioMode::gmpo) return clipped_log_ratio(c_, k.x, k.prev, k.adv).value;
    if (c_.ratio_mode != RatioMode::vespo) return k.x - k.prev;
    return vespo_log_ratio(c_, k.x, k.prev, k.gen);
  }

  /// Adds a tile's sums to the row's.
  void flush(const TileSums<Vec<T>>& s, std::int64_t start, std::int64_t end) {
    add_lanes(sums_.lane[kActor], s.actor);
    add_lanes(sums_.lane[kKl], s.kl);
    add_lanes(sums_.lane[kNll], s.nll);
    add_lanes(sums_.lane[kRatio], s.ratio);
    add_lanes(sums_.lane[kRatioClamped], s.clamped);
    add_lanes(sums_.lane[kMultProbError], s.mult);
    add_lanes(sums_.lane[kGenKl], s.gen_kl);
    add_lanes(sums_.lane[kPolicyKl], s.policy_kl);
    add_lanes(sums_.lane[kJs], s.js);
    add_lanes(sums_.lane[kImportance], s.importance);
    add_lanes(sums_.lane[kEntropy], s.entropy);
    if (corrected(c_)) add_lanes(sums_.lane[kOutOfBounds], s.oob);
    if (grouped_ratio(c_)) add_lanes(sums_.slope, s.slope);
    sums_.ratio_min = select(s.ratio_min < sums_.ratio_min, s.ratio_min, sums_.ratio_min);
    sums_.ratio_max = select(s.ratio_max > sums_.ratio_max, s.ratio_max, sums_.ratio_max);
    if (all_of(is_finite(finite_check(s))) || out_[kFirstBad] < HUGE_VAL) return;
    const bool by_ratio = grouped_ratio(c_) && !is_finite(row_.known.ratio);
    const std::int64_t bad = by_ratio ? bad_ratio_token() : first_nonfinite(row_, c_, start, end);
    if (bad >= 0) out_[kFirstBad] = static_cast<double>(b_ * a_.num_tokens + bad);
  }

  void finish_row() {
    const RowContext<T>& known = row_.known;
    for (int i = 0; i < kRatioMin; ++i)
      if (i != kValidSamples) out_[i] = total(sums_.lane[i]);
    out_[kActor] *= known.weight;
    out_[kKl] *= known.weight;
    T lowest[kLanes], highest[kLanes];
    store(lowest, sums_.ratio_min);
    store(highest, sums_.ratio_max);
    for (int l = 0; l < kLanes; ++l) {
      out_[kRatioMin] = merge_rows(RowMerge::min, out_[kRatioMin], lowest[l]);
      out_[kRatioMax] = merge_rows(RowMerge::max, out_[kRatioMax], highest[l]);
    }
    // clamping keeps the order, so the extremes of the clamped ratios are the clamped extremes
    const bool clamps = c_.ratio_mode == RatioMode::ppo || c_.ratio_mode == RatioMode::cispo;
    if (out_[kRatioMin] <= out_[kRatioMax]) {
      const T low = static_cast<T>(out_[kRatioMin]), high = static_cast<T>(out_[kRatioMax]);
      out_[kClampedMin] = clamps ? clamp_to(low, row_.lo, row_.hi) : low;
      out_[kClampedMax] = clamps ? clamp_to(high, row_.lo, row_.hi) : high;
    }
    if (grouped_ratio(c_)) spread_row_gradient();
    const T weight = truncate_importance(c_.importance_sampling, known.importance, static_cast<T>(c_.importance_min),
                                         static_cast<T>(c_.importance_max))
                         .weight;
    if (row_importance(c_)) out_[kImportance] = static_cast<double>(weight * known.kept) * row_.sample_mask;
    if (c_.importance_sampling == ImportanceSampling::seq_mask_tis)
      out_[kOutOfBounds] = (1.0 - known.kept) * row_.sample_mask;
  }

  std::int64_t bad_ratio_token() const {
    return first_bad_ratio(row_.curr, row_.prev, row_.token_mask, row_.num_tokens);
  }

  /// d(log R)/dx_t = token_mask_t / (length + 1e-8), the same slope for the whole row; GMPO's has holes.
  void spread_row_gradient() {
    const T slope = static_cast<T>(total(sums_.slope) * row_.known.grad_weight * row_.known.inverse_length);
    const T* mask = row_.token_mask;
    for (std::int64_t t = 0; t < row_.num_tokens; ++t) {
      if (mask[t] == T(0)) continue;
      const bool open = c_.ratio_mode != RatioMode::gmpo ||
                        clipped_log_ratio(c_, row_.curr[t], row_.prev[t], row_.advantages[t]).slope != T(0);
      if (open) row_.grad[t] += mask[t] * slope;
    }
    if (is_finite(slope) || out_[kFirstBad] < HUGE_VAL) return;
    out_[kFirstBad] = static_cast<double>(b_ * a_.num_tokens + bad_ratio_token());
  }

  const ClippedPGArgs<T>& a_;
  const ClippedPGConfig& c_;
  const LossWeights weights_;
  const Variant variant_;
  std::int64_t b_ = 0;
  double* out_ = nullptr;
  Row<T> row_;
  RowSums<T> sums_;
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
