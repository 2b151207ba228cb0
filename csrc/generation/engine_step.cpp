#include "generation/engine_step.h"

#include <algorithm>
#include <chrono>

#include "common/check.h"
#include "ops/likeliest.h"
#include "ops/sampling.h"
#include "runtime/tensor.h"

namespace nemo_rl::generation {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct Draw {
  Sequence* sequence = nullptr;
  std::int64_t logits_row = 0;
  std::int64_t ahead = 0;  ///< the drafts before this token
};

/// A running sequence draws its next token, and one after each draft; a prompt's last logits serve all its generations
/// that have no token yet.
std::vector<Draw> draws_of(const StepPlan& plan) {
  std::vector<Draw> draws;
  for (const PlannedSlice& slice : plan.slices) {
    if (slice.logits_row < 0) continue;
    if (slice.sequence) {
      const auto drafts = static_cast<std::int64_t>(slice.sequence->drafts.size());
      for (std::int64_t i = 0; i <= drafts; ++i) draws.push_back({slice.sequence, slice.logits_row + i, i});
      continue;
    }
    for (Sequence* s : slice.group->pending) {
      if (s->generated.empty()) draws.push_back({s, slice.logits_row});
    }
  }
  return draws;
}

/// Appends the tokens that were drawn, up to the first of each sequence that is not its draft. Returns the sequences
/// that have ended.
std::vector<const Sequence*> append_drawn(const std::vector<Draw>& draws, const std::vector<ops::SampledToken>& sampled,
                                          const at::Tensor& logits, const TokenBytes& token_bytes,
                                          EngineMetrics& metrics, const Drawn& drawn) {
  std::vector<const Sequence*> finished;
  bool follows = true;  // whether the token before is the draft that this one was drawn after
  for (std::size_t i = 0; i < draws.size(); ++i) {
    Sequence& s = *draws[i].sequence;
    const auto ahead = static_cast<std::size_t>(draws[i].ahead);
    follows = ahead == 0 || (follows && !s.finished() && s.generated.back() == s.drafts[ahead - 1]);
    if (!follows) continue;
    NRL_CHECK(sampled[i].token >= 0, "the model's logits are not finite for request ", s.id, " (draw ", s.key.draw_id,
              ", sample ", s.key.sample, ") at position ", s.length());
    s.append(sampled[i], token_bytes);
    s.likeliest = ops::likeliest(logits, draws[i].logits_row, s.params.num_likeliest, s.params.rule);
    if (ahead > 0) {
      ++s.cached;
      s.wrong_drafts = 0;
      metrics.accepted_draft_tokens += 1;
      metrics.decode_tokens += 1;
    } else if (!s.drafts.empty()) {
      ++s.wrong_drafts;
    }
    metrics.generated_tokens += 1;
    if (drawn) drawn(s.id, sampled[i].token);
    if (s.finished()) finished.push_back(&s);
  }
  for (const Draw& d : draws) d.sequence->drafts.clear();
  return finished;
}

}  // namespace

void check_prompt(std::int64_t prompt, const std::vector<std::int64_t>& token_ids, std::int64_t V) {
  NRL_CHECK_ARG(!token_ids.empty(), "prompt ", prompt,
                " is empty: generation needs at least one token, e.g. the tokenizer's BOS");
  for (const std::int64_t id : token_ids) {
    NRL_CHECK_ARG(id >= 0 && id < V, "prompt ", prompt, " holds token ", id, ", but the vocabulary has ", V, " tokens");
  }
}

void check_sampling(const SamplingParams& params, const TokenBytes& token_bytes) {
  ops::check_rule(params.rule);
  NRL_CHECK_ARG(params.max_new_tokens >= 1, "max_new_tokens = ", params.max_new_tokens, ": expected at least 1");
  NRL_CHECK_ARG(!params.stop_strings || !token_bytes.empty(),
                "stop strings need the bytes of every token: give the engine a tokenizer");
  NRL_CHECK_ARG(params.num_likeliest >= 0 && params.num_likeliest <= ops::kMostLikeliest,
                "num_likeliest = ", params.num_likeliest, ": expected 0 to ", ops::kMostLikeliest);
}

std::vector<const Sequence*> run_step(ModelRunner& runner, Scheduler& scheduler, const TokenBytes& token_bytes,
                                      bool with_entropy, EngineMetrics& metrics, const Drawn& drawn) {
  const std::int64_t preempted = scheduler.preemptions();
  const StepPlan plan = scheduler.schedule(runner.draft_rows());
  metrics.peak_blocks = std::max(metrics.peak_blocks, scheduler.blocks().num_used());
  auto start = std::chrono::steady_clock::now();
  const at::Tensor logits = runner.forward(plan.batch);
  metrics.forward_seconds += seconds_since(start);

  start = std::chrono::steady_clock::now();
  scheduler.computed(plan);
  std::vector<const Sequence*> finished;
  if (!plan.batch.logits_rows.empty()) {
    NRL_CHECK(logits.defined() && logits.dim() == 2 &&
                  logits.size(0) == static_cast<std::int64_t>(plan.batch.logits_rows.size()) &&
                  logits.size(1) == runner.vocab_size(),
              "the model runner gave logits of another shape than [", plan.batch.logits_rows.size(), ", ",
              runner.vocab_size(), "]");
    const std::vector<Draw> draws = draws_of(plan);
    std::vector<ops::RowDraw> rows;
    rows.reserve(draws.size());
    for (const Draw& d : draws) {
      rows.push_back({d.logits_row, d.sequence->params.rule, random_uniform(d.sequence->random_key(d.ahead))});
      rows.back().rule.vocab_block = runner.vocab_block();
    }
    const auto sampled = ops::sample_rows(logits, rows, with_entropy);
    finished = append_drawn(draws, sampled, logits, token_bytes, metrics, drawn);
  }
  metrics.sampling_seconds += seconds_since(start);

  metrics.steps += 1;
  metrics.prefill_tokens += plan.prefill_tokens;
  metrics.decode_tokens += plan.decode_tokens;
  metrics.draft_tokens += plan.draft_tokens;
  metrics.sequence_steps += scheduler.num_running();
  metrics.preemptions += scheduler.preemptions() - preempted;
  scheduler.retire_finished();
  return finished;
}

}  // namespace nemo_rl::generation
