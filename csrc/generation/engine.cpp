#include "generation/engine.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

#include "common/check.h"
#include "ops/sampling.h"

namespace nemo_rl::generation {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::int64_t sum_of_largest(std::vector<std::int64_t> values, std::int64_t count) {
  std::sort(values.begin(), values.end(), std::greater<>());
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < values.size() && static_cast<std::int64_t>(i) < count; ++i) sum += values[i];
  return sum;
}

}  // namespace

struct Engine::Draw {
  Sequence* sequence = nullptr;
  std::int64_t logits_row = 0;
};

Engine::Engine(std::shared_ptr<ModelRunner> runner, EngineConfig config, std::shared_ptr<const TokenBytes> token_bytes)
    : runner_(std::move(runner)), config_(config), token_bytes_(std::move(token_bytes)) {
  NRL_CHECK_ARG(runner_ != nullptr, "an engine needs a model runner");
  NRL_CHECK_ARG(config.max_model_len >= 0, "max_model_len = ", config.max_model_len,
                ": expected a length, or 0 for no limit");
  const Scheduler checks_its_config(config.scheduler, 0, 1);
  set_max_cache_bytes(config.max_cache_bytes);
  set_token_bytes(std::move(token_bytes_));
}

Engine::~Engine() = default;

void Engine::set_max_cache_bytes(std::int64_t bytes) {
  NRL_CHECK_ARG(bytes > 0, "max_cache_bytes = ", bytes, ": expected a positive number");
  config_.max_cache_bytes = bytes;
}

void Engine::set_token_bytes(std::shared_ptr<const TokenBytes> token_bytes) {
  NRL_CHECK(!busy_, "set_token_bytes() was called while generate() runs");
  token_bytes_ = token_bytes ? std::move(token_bytes) : std::make_shared<const TokenBytes>();
}

std::vector<Generation> Engine::generate(const std::vector<std::vector<std::int64_t>>& prompts,
                                         const std::vector<Request>& requests, const std::function<bool()>& interrupted,
                                         const Finished& finished, const Drawn& drawn) {
  NRL_CHECK(!busy_, "generate() was called while another generate() of this engine runs");
  struct Emptied {  // also when something throws
    Engine& engine;
    ~Emptied() {
      engine.just_finished_.clear();
      engine.scheduler_.reset();
      engine.sequences_.clear();
      engine.groups_.clear();
      engine.busy_ = false;
    }
  } emptied{*this};
  busy_ = true;
  add(prompts, requests);
  while (scheduler_->has_unfinished()) {
    if (interrupted && interrupted()) throw GenerationInterrupted();
    step(drawn);
    if (finished && !just_finished_.empty() && scheduler_->has_unfinished()) tell(finished);
  }
  NRL_CHECK(scheduler_->blocks().num_used() == 0, scheduler_->blocks().num_used(), " cache blocks were not given back");
  std::vector<Generation> out;
  out.reserve(sequences_.size());
  for (auto& s : sequences_) {
    out.push_back({std::move(s->generated), std::move(s->logprobs), std::move(s->entropies), s->finish_reason});
  }
  return out;
}

void Engine::tell(const Finished& finished) {
  std::vector<std::int64_t> requests;
  std::vector<const std::vector<std::int64_t>*> token_ids;
  for (const Sequence* s : just_finished_) {
    requests.push_back(s->id);
    token_ids.push_back(&s->generated);
  }
  finished(requests, token_ids);
}

void Engine::check(const std::vector<std::vector<std::int64_t>>& prompts, const Request& request) const {
  NRL_CHECK_ARG(request.prompt >= 0 && request.prompt < static_cast<std::int64_t>(prompts.size()), "prompt ",
                request.prompt, " of ", prompts.size(), " prompts");
  const auto& prompt = prompts[request.prompt];
  NRL_CHECK_ARG(!prompt.empty(), "prompt ", request.prompt,
                " is empty: generation needs at least one token, e.g. the tokenizer's BOS");
  ops::check_rule(request.params.rule);
  NRL_CHECK_ARG(request.params.max_new_tokens >= 1, "max_new_tokens = ", request.params.max_new_tokens,
                ": expected at least 1");
  NRL_CHECK_ARG(!request.params.stop_strings || !token_bytes_->empty(),
                "stop strings need the bytes of every token: give the engine a tokenizer");
}

void Engine::add(const std::vector<std::vector<std::int64_t>>& prompts, const std::vector<Request>& requests) {
  const std::int64_t V = runner_->vocab_size();
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    for (const std::int64_t id : prompts[p]) {
      NRL_CHECK_ARG(id >= 0 && id < V, "prompt ", p, " holds token ", id, ", but the vocabulary has ", V, " tokens");
    }
    groups_.push_back(std::make_unique<PromptGroup>());
    groups_.back()->tokens = prompts[p];
    groups_.back()->priority = static_cast<std::int64_t>(p);
  }
  for (const Request& request : requests) {
    check(prompts, request);
    auto s = std::make_unique<Sequence>();
    s->id = static_cast<std::int64_t>(sequences_.size());
    s->group = groups_[request.prompt].get();
    s->params = request.params;
    s->key = request.key;
    s->max_length = s->group->length() + request.params.max_new_tokens;
    if (config_.max_model_len > 0) s->max_length = std::min(s->max_length, config_.max_model_len);
    if (s->max_length > s->group->length()) {
      s->group->pending.push_back(s.get());
    } else {
      s->finish_reason = FinishReason::length;
    }
    sequences_.push_back(std::move(s));
  }
  prepare_cache();
  scheduler_ = std::make_unique<Scheduler>(config_.scheduler, cache_blocks_, runner_->block_size());
  for (auto& group : groups_) {
    scheduler_->add(group.get());
    const auto G = static_cast<std::int64_t>(group->pending.size());
    if (G > 1) metrics_.shared_prompt_tokens += (G - 1) * group->length();
  }
}

/// As many blocks as these requests can use at once, within max_cache_bytes; a larger cache is kept as it is.
void Engine::prepare_cache() {
  const std::int64_t block = runner_->block_size(), slots = config_.scheduler.max_batch_size;
  const std::int64_t limit = config_.max_cache_bytes / std::max<std::int64_t>(runner_->bytes_per_block(), 1);
  std::vector<std::int64_t> own, shared;
  std::int64_t least = 0;
  for (const auto& group : groups_) {
    if (group->pending.empty()) continue;
    shared.push_back((group->length() + block - 1) / block);
    for (const Sequence* s : group->pending) {
      own.push_back((s->max_length + block - 1) / block - group->length() / block + 1);  // and one in reserve
      least = std::max(least, Scheduler::blocks_needed(group->length(), s->max_length, block));
    }
  }
  const std::int64_t useful = std::max(least, sum_of_largest(own, slots) + sum_of_largest(shared, slots));
  const std::int64_t wanted = std::min(useful, limit);
  NRL_CHECK_ARG(least <= std::max(wanted, cache_blocks_), "the longest sequence needs ", least, " cache blocks of ",
                block, " tokens (", static_cast<double>(least * runner_->bytes_per_block()) / (1 << 30),
                " GiB), but the cache may hold ", limit,
                ": raise policy.generation.kv_cache_gb or lower max_new_tokens");
  if (wanted <= cache_blocks_) return;
  cache_blocks_ = 0;
  runner_->allocate_cache(wanted);
  cache_blocks_ = wanted;
}

void Engine::release_cache() {
  NRL_CHECK(!busy_, "release_cache() was called while generate() runs");
  runner_->release_cache();
  cache_blocks_ = 0;
}

void Engine::step(const Drawn& drawn) {
  const std::int64_t preempted = scheduler_->preemptions();
  const StepPlan plan = scheduler_->schedule();
  auto start = std::chrono::steady_clock::now();
  const at::Tensor logits = runner_->forward(plan.batch);
  metrics_.forward_seconds += seconds_since(start);

  start = std::chrono::steady_clock::now();
  scheduler_->computed(plan);
  append_sampled(plan, logits, drawn);
  metrics_.sampling_seconds += seconds_since(start);

  metrics_.steps += 1;
  metrics_.prefill_tokens += plan.prefill_tokens;
  metrics_.decode_tokens += plan.decode_tokens;
  metrics_.sequence_steps += scheduler_->num_running();
  metrics_.peak_blocks = std::max(metrics_.peak_blocks, scheduler_->blocks().num_used());
  metrics_.preemptions += scheduler_->preemptions() - preempted;
  scheduler_->retire_finished();
}

/// A running sequence draws its next token; a prompt's last logits serve all its generations that have none yet.
std::vector<Engine::Draw> Engine::draws_of(const StepPlan& plan) const {
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

void Engine::append_sampled(const StepPlan& plan, const at::Tensor& logits, const Drawn& drawn) {
  just_finished_.clear();
  if (plan.batch.logits_rows.empty()) return;
  NRL_CHECK(logits.defined() && logits.dim() == 2 &&
                logits.size(0) == static_cast<std::int64_t>(plan.batch.logits_rows.size()) &&
                logits.size(1) == runner_->vocab_size(),
            "the model runner gave logits of another shape than [", plan.batch.logits_rows.size(), ", ",
            runner_->vocab_size(), "]");
  const std::vector<Draw> draws = draws_of(plan);
  std::vector<ops::RowDraw> rows;
  rows.reserve(draws.size());
  for (const Draw& d : draws) {
    rows.push_back({d.logits_row, d.sequence->params.rule, random_uniform(d.sequence->random_key())});
    rows.back().rule.vocab_block = runner_->vocab_block();
  }
  const auto sampled = ops::sample_rows(logits, rows, config_.with_entropy);
  for (std::size_t i = 0; i < draws.size(); ++i) {
    Sequence& s = *draws[i].sequence;
    NRL_CHECK(sampled[i].token >= 0, "the model's logits are not finite for request ", s.id, " (draw ", s.key.draw_id,
              ", sample ", s.key.sample, ") at position ", s.length());
    s.append(sampled[i], *token_bytes_);
    if (drawn) drawn(s.id, sampled[i].token);
    if (s.finished()) just_finished_.push_back(&s);
  }
  metrics_.generated_tokens += static_cast<std::int64_t>(draws.size());
}

}  // namespace nemo_rl::generation
