#include "trainer/packed_batch.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::trainer {
namespace {

struct Rows {
  explicit Rows(const RowBatch& batch)
      : ids(batch.token_ids.const_data_ptr<std::int64_t>()),
        starts(batch.starts.const_data_ptr<std::int64_t>()),
        lengths(batch.lengths.const_data_ptr<std::int64_t>()),
        groups(batch.group_ids.const_data_ptr<std::int64_t>()),
        targets(batch.targets.defined() ? batch.targets.const_data_ptr<std::int64_t>() : ids),
        K(batch.targets.defined() ? batch.targets.size(1) : 1),
        mask(batch.token_mask.const_data_ptr<bool>()) {}
  const std::int64_t* row(std::int64_t b) const { return ids + starts[b]; }
  const std::int64_t *ids, *starts, *lengths, *groups;
  const std::int64_t* targets;  // [T, K]
  std::int64_t K;
  const bool* mask;
};

void check(const RowBatch& b) {
  const auto vector = [](const at::Tensor& t, std::int64_t size) {
    return t.dim() == 1 && t.numel() == size && t.scalar_type() == at::kLong && t.is_contiguous() && t.is_cpu();
  };
  NRL_CHECK_ARG(b.token_ids.is_contiguous() && b.token_ids.scalar_type() == at::kLong && b.token_ids.device().is_cpu(),
                "token_ids must be a contiguous int64 CPU tensor, got ", b.token_ids.sizes());
  const std::int64_t B = b.lengths.numel(), T = b.token_ids.numel();
  NRL_CHECK_ARG(vector(b.starts, B) && vector(b.lengths, B) && vector(b.group_ids, B) &&
                    b.token_mask.scalar_type() == at::kBool && b.token_mask.sizes() == b.token_ids.sizes() &&
                    b.token_mask.is_contiguous() && b.token_mask.is_cpu(),
                "starts, lengths and group_ids must be int64 [B], token_mask bool like token_ids ",
                b.token_ids.sizes());
  NRL_CHECK_ARG(
      !b.targets.defined() || (b.targets.dim() == 2 && b.targets.size(0) == T && b.targets.size(1) >= 1 &&
                               b.targets.scalar_type() == at::kLong && b.targets.is_contiguous() && b.targets.is_cpu()),
      "targets must be contiguous int64 [", T, ", K]");
  for (std::int64_t i = 0; i < B; ++i) {
    const auto start = b.starts.const_data_ptr<std::int64_t>()[i];
    const auto length = b.lengths.const_data_ptr<std::int64_t>()[i];
    NRL_CHECK_ARG(length >= 1 && start >= 0 && length <= T - start, "row ", i, " of length ", length, " at ", start,
                  " does not lie within the ", T, " tokens of the batch");
  }
}

bool same_prompt(const Rows& rows, const std::vector<RowTokens>& tokens, std::int64_t a, std::int64_t b) {
  const std::int64_t P = tokens[static_cast<std::size_t>(a)].prompt;
  return rows.groups[a] >= 0 && rows.groups[a] == rows.groups[b] && P > 0 &&
         P == tokens[static_cast<std::size_t>(b)].prompt &&
         std::memcmp(rows.row(a), rows.row(b), static_cast<std::size_t>(P) * sizeof(std::int64_t)) == 0;
}

/// Runs of consecutive rows that share a prompt.
std::vector<std::vector<std::int64_t>> prompt_runs(const Rows& rows, const std::vector<RowTokens>& tokens,
                                                   const std::vector<std::int64_t>& samples, bool share_prefix) {
  std::vector<std::vector<std::int64_t>> runs;
  for (auto b : samples) {
    if (share_prefix && !runs.empty() && same_prompt(rows, tokens, runs.back().front(), b)) {
      runs.back().push_back(b);
    } else {
      runs.push_back({b});
    }
  }
  return runs;
}

/// The tokens that a run computes once.
std::int64_t shared_prompt(const std::vector<std::int64_t>& run, const std::vector<RowTokens>& tokens) {
  return run.size() > 1 ? tokens[static_cast<std::size_t>(run.front())].prompt : 0;
}

void check_wanted(std::int64_t computed, const std::vector<std::int64_t>& samples) {
  NRL_CHECK_ARG(computed > 0, "none of these ", samples.size(), " rows has a wanted token (token_mask)");
}

struct Pair {
  std::int64_t row, place, target, sample;
};

class Packer {
 public:
  Packer(const RowBatch& batch, PackedBatch& out) : rows_(batch), out_(out) {}

  /// Row b's tokens [from, to), if there are any, as a sequence behind a prefix of `from` tokens at prefix_start.
  void add(std::int64_t b, std::int64_t from, std::int64_t to, std::int64_t prefix_start) {
    if (from == to) return;
    const std::int64_t start = static_cast<std::int64_t>(tokens_.size());
    out_.sequences.push_back({start, to - from, prefix_start, from});
    for (std::int64_t t = from; t < to; ++t) {
      tokens_.push_back(rows_.row(b)[t]);
      positions_.push_back(t);
    }
  }
  /// Wanted log-probabilities of row b, whose token t < split lies at prefix_start + t, others at start + t - split.
  void want(std::int64_t b, std::int64_t split, std::int64_t prefix_start, std::int64_t start) {
    for (std::int64_t t = 1; t < rows_.lengths[b]; ++t) {
      const std::int64_t before = t - 1, place = rows_.starts[b] + t;
      if (!rows_.mask[place]) continue;
      const std::int64_t row = before < split ? prefix_start + before : start + before - split;
      for (std::int64_t k = place * rows_.K; k < (place + 1) * rows_.K; ++k)
        pairs_.push_back({row, k, rows_.targets[k], b});
    }
  }
  std::int64_t size() const { return static_cast<std::int64_t>(tokens_.size()); }

  void finish() {
    std::stable_sort(pairs_.begin(), pairs_.end(), [](const Pair& x, const Pair& y) { return x.row < y.row; });
    for (const auto& p : pairs_) {
      if (out_.query.rows.empty() || out_.query.rows.back() != p.row) out_.query.rows.push_back(p.row);
      out_.query.pair_row.push_back(static_cast<std::int64_t>(out_.query.rows.size()) - 1);
      out_.query.targets.push_back(p.target);
      out_.places.push_back(p.place);
      out_.samples.push_back(p.sample);
    }
    out_.token_ids = at::tensor(tokens_, at::kLong);
    out_.positions = at::tensor(positions_, at::kLong);
  }

 private:
  Rows rows_;
  PackedBatch& out_;
  std::vector<std::int64_t> tokens_, positions_;
  std::vector<Pair> pairs_;
};

}  // namespace

std::vector<RowTokens> row_tokens(const RowBatch& batch) {
  check(batch);
  const Rows given(batch);
  std::vector<RowTokens> rows(static_cast<std::size_t>(batch.lengths.numel()));
  for (std::size_t b = 0; b < rows.size(); ++b) {
    const bool* const mask = given.mask + given.starts[b];
    const std::int64_t length = given.lengths[b];
    std::int64_t first = 1, last = length - 1;
    while (first < length && !mask[first]) ++first;
    while (last > first && !mask[last]) --last;
    if (first < length) rows[b] = {first, last};
  }
  return rows;
}

PackedBatch pack_batch(const RowBatch& batch, const std::vector<std::int64_t>& samples, bool share_prefix) {
  const auto tokens = row_tokens(batch);
  const Rows rows(batch);
  PackedBatch out;
  Packer packer(batch, out);
  for (const auto& run : prompt_runs(rows, tokens, samples, share_prefix)) {
    const std::int64_t P = shared_prompt(run, tokens);
    const std::int64_t prefix_start = packer.size();
    if (P > 0) packer.add(run.front(), 0, P, 0);
    for (auto b : run) {
      const std::int64_t start = packer.size();
      packer.add(b, P, tokens[static_cast<std::size_t>(b)].read, P > 0 ? prefix_start : 0);
      packer.want(b, P, prefix_start, start);
    }
  }
  check_wanted(packer.size(), samples);
  packer.finish();
  return out;
}

PromptUnits prompt_units(const RowBatch& batch, const std::vector<std::int64_t>& samples, std::int64_t max_tokens,
                         bool share_prefix) {
  const auto tokens = row_tokens(batch);
  const Rows rows(batch);
  const auto B = batch.lengths.numel(), count = static_cast<std::int64_t>(samples.size());
  for (std::int64_t i = 0; i < count; ++i)
    NRL_CHECK_ARG(samples[static_cast<std::size_t>(i)] >= (i == 0 ? 0 : samples[static_cast<std::size_t>(i - 1)] + 1) &&
                      samples[static_cast<std::size_t>(i)] < B,
                  "samples must be ascending rows of the batch of ", B, ", got row ",
                  samples[static_cast<std::size_t>(i)], " at place ", i);
  PromptUnits units;
  for (const auto& run : prompt_runs(rows, tokens, samples, share_prefix)) {
    const std::int64_t P = shared_prompt(run, tokens);
    bool begin = true;
    for (auto b : run) {
      const std::int64_t own = tokens[static_cast<std::size_t>(b)].read - P;
      if (begin || units.tokens.back() + own > max_tokens) {
        units.rows.emplace_back();
        units.tokens.push_back(P);
      }
      units.rows.back().push_back(b);
      units.tokens.back() += own;
      begin = false;
    }
  }
  return units;
}

std::int64_t packed_tokens(const RowBatch& batch, const std::vector<std::int64_t>& samples, bool share_prefix) {
  const auto tokens = row_tokens(batch);
  std::int64_t sum = 0;
  for (const auto& run : prompt_runs(Rows(batch), tokens, samples, share_prefix)) {
    const std::int64_t P = shared_prompt(run, tokens);
    sum += P;
    for (auto b : run) sum += tokens[static_cast<std::size_t>(b)].read - P;
  }
  check_wanted(sum, samples);
  return sum;
}

}  // namespace nemo_rl::trainer
