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
};

/// A running sequence draws its next token; a prompt's last logits serve all its generations that have none yet.
std::vector<Draw> draws_of(const StepPlan& plan) {
  std::vector<Draw> draws;
  for (const PlannedSlice& slice : plan.slices) {
    if (slice.logits_row < 0) continue;
    if (slice.sequence) {
      draws.push_back({slice.sequence, slice.logits_row});
      continue;
    }
    for (Sequence* s : slice.group->pending) {
      if (s->generated.empty()) draws.push_back({s, slice.logits_row});
    }
  }
  return draws;
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
  const StepPlan plan = scheduler.schedule();
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
      rows.push_back({d.logits_row, d.sequence->params.rule, random_uniform(d.sequence->random_key())});
      rows.back().rule.vocab_block = runner.vocab_block();
    }
    const auto sampled = ops::sample_rows(logits, rows, with_entropy);
    for (std::size_t i = 0; i < draws.size(); ++i) {
      Sequence& s = *draws[i].sequence;
      NRL_CHECK(sampled[i].token >= 0, "the model's logits are not finite for request ", s.id, " (draw ", s.key.draw_id,
                ", sample ", s.key.sample, ") at position ", s.length());
      s.append(sampled[i], token_bytes);
      s.likeliest = ops::likeliest(logits, draws[i].logits_row, s.params.num_likeliest, s.params.rule);
      if (drawn) drawn(s.id, sampled[i].token);
      if (s.finished()) finished.push_back(&s);
    }
    metrics.generated_tokens += static_cast<std::int64_t>(draws.size());
  }
  metrics.sampling_seconds += seconds_since(start);

  metrics.steps += 1;
  metrics.prefill_tokens += plan.prefill_tokens;
  metrics.decode_tokens += plan.decode_tokens;
  metrics.sequence_steps += scheduler.num_running();
  metrics.preemptions += scheduler.preemptions() - preempted;
  scheduler.retire_finished();
  return finished;
}

}  // namespace nemo_rl::generation
