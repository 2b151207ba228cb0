#include "kernels/sampling.h"

#include <cfloat>
#include <cmath>

#include "kernels/cpu/vec.h"
#include "kernels/token_order.h"

// No std:: algorithm here: a template compiled for one CPU capability must not be what the linker keeps for another.

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

constexpr float kInf = __builtin_inff();

bool above(const FilterCandidate& a, const FilterCandidate& b) {
  return a.order != b.order ? a.order > b.order : a.id > b.id;
}

void swap(FilterCandidate& a, FilterCandidate& b) {
  const FilterCandidate t = a;
  a = b;
  b = t;
}

void sort_descending(FilterCandidate* c, std::int64_t n) {
  for (std::int64_t i = 1; i < n; ++i) {
    const FilterCandidate x = c[i];
    std::int64_t j = i;
    for (; j > 0 && above(x, c[j - 1]); --j) c[j] = c[j - 1];
    c[j] = x;
  }
}

/// Going down from the largest, the last candidate before which the weights sum to less than `need`. Quickselect:
/// linear time on average, c is permuted.
template <class Weight>
FilterCandidate last_needed(FilterCandidate* c, std::int64_t n, double need, Weight weight) {
  double sum = 0;  // weight of everything known to lie above c
  while (n > 24) {
    if (above(c[n / 2], c[0])) swap(c[n / 2], c[0]);
    if (above(c[n - 1], c[0])) swap(c[n - 1], c[0]);
    if (above(c[n - 1], c[n / 2])) swap(c[n - 1], c[n / 2]);
    const FilterCandidate pivot = c[n / 2];  // of three distinct ones, so both parts below hold at least one
    std::int64_t left = 0;
    double left_sum = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      if (above(pivot, c[i])) continue;
      left_sum += weight(c[i]);
      swap(c[i], c[left++]);
    }
    if (sum + left_sum >= need) {
      n = left;
    } else {
      sum += left_sum;
      c += left;
      n -= left;
    }
  }
  sort_descending(c, n);
  std::int64_t i = 0;
  for (; i + 1 < n; ++i) {
    sum += weight(c[i]);
    if (sum >= need) break;
  }
  return c[i];
}

constexpr int kMargins = 5;
constexpr float kMargin[kMargins] = {3, 6, 10, 16, 30};

/// For every margin, the tokens with z - max >= -margin: how many, and their sum of exp(z - max).
struct Shares {
  double count[kMargins] = {};
  double mass[kMargins] = {};
};

Shares shares_within_margins(const float* x, std::int64_t V, float inverse, float max) {
  Floats one = Floats(1.0f);
  Shares shares;
  for (std::int64_t begin = 0; begin < V; begin += kVocabBlock) {
    const std::int64_t end = begin + kVocabBlock < V ? begin + kVocabBlock : V;
    Floats mass[kMargins], count[kMargins];
    for (int m = 0; m < kMargins; ++m) mass[m] = count[m] = Floats(0);
    for (std::int64_t i = begin; i < end; i += kLanes) {
      Floats d = (i + kLanes <= end ? load<Floats>(x + i) : load<Floats>(x + i, end - i, -kInf)) * inverse - max;
      Floats e = exp_flushed(d);
      for (int m = 0; m < kMargins; ++m) {
        mass[m] += select(d >= Floats(-kMargin[m]), e, Floats(0));
        count[m] += select(d >= Floats(-kMargin[m]), one, Floats(0));
      }
    }
    for (int m = 0; m < kMargins; ++m) {
      shares.mass[m] += sum_of(mass[m]);
      shares.count[m] += sum_of(count[m]);
    }
  }
  return shares;
}

/// Fills scratch with the tokens near the maximum among which the filter's decision lies: usually a few hundred.
std::int64_t gather_candidates(const float* x, std::int64_t V, const SamplingRule& rule, const LogSumExp& row,
                               const FilterScratch& scratch) {
  const float inverse = 1.0f / rule.temperature;
  const bool by_count = rule.top_k > 0 && rule.top_k < V;
  const double need = rule.top_p * std::exp(static_cast<double>(row.log_sum)) * (1 + 1e-5);
  const Shares shares = shares_within_margins(x, V, inverse, row.max);
  float margin = FLT_MAX;
  for (int m = kMargins - 1; m >= 0; --m) {
    if (by_count ? shares.count[m] >= static_cast<double>(rule.top_k) : shares.mass[m] >= need) margin = kMargin[m];
  }
  std::int64_t n = 0;
  for (std::int64_t v = 0; v < V; ++v) {
    scratch.logits[n] = x[v];
    scratch.ids[n] = static_cast<std::int32_t>(v);
    n += x[v] * inverse - row.max >= -margin ? 1 : 0;
  }
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const std::int64_t lanes = n - i < kLanes ? n - i : kLanes;
    Floats z =
        (lanes == kLanes ? load<Floats>(scratch.logits + i) : load<Floats>(scratch.logits + i, lanes, -kInf)) * inverse;
    float order[kLanes], mass[kLanes];
    store(order, z);
    store(mass, exp_flushed(z - row.max));
    for (std::int64_t j = 0; j < lanes; ++j)
      scratch.candidates[i + j] = {order_of(order[j]), scratch.ids[i + j], mass[j]};
  }
  return n;
}

/// A row (or what a filter left of it) with the sums by which a token is drawn.
struct BlockedRow {
  const float* logits;
  std::int64_t n;
  float temperature;
  std::int64_t block;
  std::int64_t count;
  VocabBlockSum blocks[kMaxVocab / kVocabBlock];
  LogSumExp row;

  BlockedRow(const float* x, std::int64_t entries, std::int64_t summed, float t, bool with_entropy)
      : logits(x), n(entries), temperature(t), block(summed), count((entries + block - 1) / block) {
    for (std::int64_t b = 0; b < count; ++b) blocks[b] = vocab_block_sum(x + b * block, length(b), t, with_entropy);
    row = combine_block_sums(blocks, count, with_entropy);
  }

  std::int64_t length(std::int64_t b) const { return n - b * block < block ? n - b * block : block; }

  double scale(std::int64_t b) const { return std::exp(static_cast<double>(blocks[b].max) - row.max); }

  /// The first index whose cumulative mass exceeds u of the whole; never one without mass.
  std::int64_t draw(double u) const {
    double total = 0;
    for (std::int64_t b = 0; b < count; ++b) total += scale(b) * blocks[b].sum;
    double rest = u * total;
    std::int64_t chosen = -1;
    for (std::int64_t b = 0; b < count; ++b) {
      const double mass = scale(b) * blocks[b].sum;
      if (mass <= 0) continue;
      chosen = b;
      if (rest < mass) break;
      rest -= mass;
    }
    return chosen * block + draw_in_block(chosen, rest / scale(chosen));
  }

  /// Should rounding leave `rest` above the block's sum, its last entry with mass is taken.
  std::int64_t draw_in_block(std::int64_t b, double rest) const {
    const float* x = logits + b * block;
    const std::int64_t entries = length(b);
    const float inverse = 1.0f / temperature, max = blocks[b].max;
    double sum = 0;
    std::int64_t last = 0;
    for (std::int64_t i = 0; i < entries; i += kLanes) {
      const std::int64_t lanes = entries - i < kLanes ? entries - i : kLanes;
      float e[kLanes];
      store(e,
            exp_flushed((lanes == kLanes ? load<Floats>(x + i) : load<Floats>(x + i, lanes, -kInf)) * inverse - max));
      for (std::int64_t j = 0; j < lanes; ++j) {
        if (e[j] <= 0) continue;
        sum += e[j];
        last = i + j;
        if (sum > rest) return last;
      }
    }
    return last;
  }

  std::int64_t argmax() const {
    std::int64_t b = 0;
    while (blocks[b].max != row.max) ++b;
    std::int64_t i = b * block;
    while (logits[i] != row.max) ++i;
    return i;
  }
};

SampledToken unfit() { return {-1, -kInf, 0}; }

}  // namespace

std::int64_t filter_row(const float* logits, std::int64_t V, const SamplingRule& rule, const FilterScratch& scratch) {
  const LogSumExp row = log_sum_exp_row(logits, V, rule.temperature, false);
  if (!std::isfinite(row.log_sum)) return 0;
  const std::int64_t n = gather_candidates(logits, V, rule, row, scratch);
  FilterCandidate* const c = scratch.candidates;
  std::int64_t left = n;
  FilterCandidate threshold{0, 0, 0};
  if (rule.top_k > 0 && rule.top_k < n) {
    threshold = last_needed(c, n, static_cast<double>(rule.top_k), [](const FilterCandidate&) { return 1.0; });
    threshold.id = 0;  // ties with the k-th value stay
    left = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      if (c[i].order >= threshold.order) swap(c[i], c[left++]);
    }
  }
  if (rule.top_p < 1) {
    const bool by_count = rule.top_k > 0 && rule.top_k < V;
    double total = by_count ? 0.0 : std::exp(static_cast<double>(row.log_sum));
    for (std::int64_t i = 0; by_count && i < left; ++i) total += c[i].mass;
    threshold = last_needed(c, left, rule.top_p * total, [](const FilterCandidate& a) { return double{a.mass}; });
  }
  const float inverse = 1.0f / rule.temperature;
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const FilterCandidate candidate{order_of(scratch.logits[i] * inverse), scratch.ids[i], 0};
    scratch.logits[kept] = scratch.logits[i];
    scratch.ids[kept] = scratch.ids[i];
    kept += above(threshold, candidate) ? 0 : 1;
  }
  return kept;
}

SampledToken sample_row(const float* logits, std::int64_t V, const SamplingRule& rule, double u,
                        const FilterScratch& scratch, bool with_entropy) {
  const bool filters = rule.filters(V);
  const std::int64_t n = filters ? filter_row(logits, V, rule, scratch) : V;
  if (n == 0) return unfit();
  const BlockedRow row(filters ? scratch.logits : logits, n, filters ? kVocabBlock : rule.vocab_block,
                       rule.greedy ? 1.0f : rule.temperature, with_entropy);
  if (!std::isfinite(row.row.log_sum)) return unfit();
  const std::int64_t i = rule.greedy ? row.argmax() : row.draw(u);
  return {filters ? scratch.ids[i] : i, token_logprob(row.logits[i], row.temperature, row.row), row.row.entropy};
}

SampledToken score_row(const float* logits, std::int64_t V, const SamplingRule& rule, std::int64_t token,
                       const FilterScratch& scratch, bool with_entropy) {
  const bool filters = rule.filters(V);
  const std::int64_t n = filters ? filter_row(logits, V, rule, scratch) : V;
  if (n == 0) return unfit();
  const float temperature = rule.greedy ? 1.0f : rule.temperature;
  const LogSumExp row = log_sum_exp_row(filters ? scratch.logits : logits, n, temperature, with_entropy);
  if (!std::isfinite(row.log_sum)) return unfit();
  SampledToken out{token, token_logprob(logits[token], temperature, row), row.entropy};
  if (filters) {
    std::int64_t begin = 0, end = n;  // ids ascend
    while (begin < end) {
      const std::int64_t middle = (begin + end) / 2;
      if (scratch.ids[middle] < token) begin = middle + 1;
      else end = middle;
    }
    if (begin == n || scratch.ids[begin] != token) out.logprob = -kInf;
  }
  return out;
}

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
