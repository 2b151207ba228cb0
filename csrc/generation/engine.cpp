#include "generation/engine.h"

#include <algorithm>

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::generation {
namespace {

std::int64_t sum_of_largest(std::vector<std::int64_t> values, std::int64_t count) {
  std::sort(values.begin(), values.end(), std::greater<>());
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < values.size() && static_cast<std::int64_t>(i) < count; ++i) sum += values[i];
  return sum;
}

}  // namespace

Engine::Engine(std::shared_ptr<ModelRunner> runner, EngineConfig config, std::shared_ptr<const TokenBytes> token_bytes)
    : runner_(std::move(runner)), config_(config), token_bytes_(std::move(token_bytes)) {
  NRL_CHECK_ARG(runner_ != nullptr, "an engine needs a model runner");
  NRL_CHECK_ARG(config.max_model_len >= 0, "max_model_len = ", config.max_model_len,
                ": expected a length, or 0 for no limit");
  const Scheduler checks_its_config(config.scheduler, {{}}, 1);
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
                                         const Finished& finished, const Drawn& drawn, const Pause& pause) {
  if (paused_) give_up();
  NRL_CHECK(!busy_, "generate() was called while another generate() of this engine runs");
  busy_ = true;
  try {
    drawn_ = drawn;
    add(prompts, requests, pause);
    return run(interrupted, finished);
  } catch (...) {
    give_up();
    throw;
  }
}

std::vector<Generation> Engine::resume(const std::function<bool()>& interrupted, const Finished& finished) {
  NRL_CHECK(paused_, "resume() was called, but nothing is paused");
  paused_ = false;
  try {
    scheduler_->resume();
    return run(interrupted, finished);
  } catch (...) {
    give_up();
    throw;
  }
}

std::vector<Generation> Engine::run(const std::function<bool()>& interrupted, const Finished& finished) {
  while (scheduler_->has_unfinished()) {
    if (interrupted && interrupted()) throw GenerationInterrupted();
    just_finished_ = run_step(*runner_, *scheduler_, *token_bytes_, config_.with_entropy, metrics_, drawn_);
    const bool some_left = scheduler_->has_unfinished() || scheduler_->num_paused() > 0;
    if (finished && !just_finished_.empty() && some_left) tell(finished);
  }
  just_finished_.clear();
  paused_ = scheduler_->num_paused() > 0;
  if (paused_) return {};
  NRL_CHECK(scheduler_->blocks().num_used() == 0, scheduler_->blocks().num_used(), " cache blocks were not given back");
  std::vector<Generation> out;
  out.reserve(sequences_.size());
  for (auto& s : sequences_) {
    out.push_back({std::move(s->generated), std::move(s->logprobs), std::move(s->entropies), s->finish_reason});
  }
  give_up();
  return out;
}

/// Forgets the call in progress.
void Engine::give_up() {
  just_finished_.clear();
  scheduler_.reset();
  sequences_.clear();
  groups_.clear();
  drawn_ = {};
  busy_ = paused_ = false;
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
  if (prompts[request.prompt].empty()) check_prompt(request.prompt, {}, runner_->vocab_size());  // the others: add()
  check_sampling(request.params, *token_bytes_);
}

void Engine::add(const std::vector<std::vector<std::int64_t>>& prompts, const std::vector<Request>& requests,
                 const Pause& pause) {
  const std::int64_t V = runner_->vocab_size();
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    if (!prompts[p].empty()) check_prompt(static_cast<std::int64_t>(p), prompts[p], V);  // one without requests may be
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
    s->group->members.push_back(s.get());
    s->max_length = s->group->length() + request.params.max_new_tokens;
    if (config_.max_model_len > 0) s->max_length = std::min(s->max_length, config_.max_model_len);
    if (s->max_length > s->group->length()) {
      s->group->pending.push_back(s.get());
    } else {
      s->finish_reason = FinishReason::length;
    }
    sequences_.push_back(std::move(s));
  }
  const bool for_all = pause.after_tokens > 0 && pause.keep_cache;
  prepare_cache(for_all);
  prepare_states(for_all);
  scheduler_ = std::make_unique<Scheduler>(config_.scheduler, pool_sizes(*runner_, cache_blocks_),
                                           runner_->block_size(), states_);
  if (pause.after_tokens > 0) scheduler_->pause_after(pause.after_tokens, pause.keep_cache);
  for (auto& group : groups_) {
    scheduler_->add(group.get());
    const auto G = static_cast<std::int64_t>(group->pending.size());
    if (G > 1) metrics_.shared_prompt_tokens += (G - 1) * group->length();
  }
}

/// The blocks that these requests use of a pool if `slots` of them run at once.
PoolNeed Engine::need_of(const CachePool& pool, std::int64_t slots) const {
  const std::int64_t block = runner_->block_size(), chunk = config_.scheduler.prefill_chunk_tokens;
  const auto most = [&](std::int64_t tokens, std::int64_t at_once) {
    return most_blocks(pool.window, block, tokens, at_once);
  };
  std::vector<std::int64_t> own, shared;
  std::int64_t least = 0, chunks = 0;
  for (const auto& group : groups_) {
    if (group->pending.empty()) continue;
    const std::int64_t P = group->length();
    std::int64_t of_prompt = most(P, 1);
    for (const Sequence* s : group->pending) {
      const std::int64_t held = most(s->max_length, 1);
      const std::int64_t after = std::min((s->max_length + block - 1) / block - P / block, held);
      own.push_back(after + 1);  // and one in reserve
      // a response without others takes over the blocks of its prompt
      if (group->pending.size() == 1) of_prompt = std::min(of_prompt, held - after);
      least = std::max(least, Scheduler::blocks_needed(config_.scheduler, pool.window, block, P, s->max_length));
      chunks = std::max(chunks, most(s->max_length, chunk) - held);
    }
    shared.push_back(of_prompt);
  }
  return {pool, least, std::max(least, sum_of_largest(own, slots) + sum_of_largest(shared, slots) + chunks)};
}

/// As many blocks as these requests can use at once, within max_cache_bytes; a larger cache is kept as it is.
/// `for_all`: as many as all requests fill, since a preemption would compute keys and values that are to be kept again.
void Engine::prepare_cache(bool for_all) {
  const std::int64_t slots = for_all ? static_cast<std::int64_t>(sequences_.size()) : config_.scheduler.max_batch_size;
  std::vector<PoolNeed> needs;
  for (const CachePool& pool : runner_->cache_pools()) needs.push_back(need_of(pool, slots));
  cache_blocks_.resize(needs.size(), 0);
  auto with_held = needs;
  for (std::size_t p = 0; p < needs.size(); ++p) with_held[p].useful = std::max(with_held[p].useful, cache_blocks_[p]);
  const auto wanted = divide_cache(with_held, config_.max_cache_bytes);
  bool grows = false, fits = true, fits_all = true;
  for (std::size_t p = 0; p < needs.size(); ++p) grows = grows || wanted[p] > cache_blocks_[p];
  for (std::size_t p = 0; p < needs.size(); ++p) {
    const std::int64_t blocks = grows ? wanted[p] : cache_blocks_[p];
    fits = fits && needs[p].least <= blocks;
    fits_all = fits_all && needs[p].useful <= blocks;
  }
  NRL_CHECK_ARG(fits, "the longest sequence needs ", least_blocks(needs), " cache blocks of ", runner_->block_size(),
                " tokens (", static_cast<double>(least_bytes(needs)) / (1 << 30), " GiB), but the cache may hold ",
                blocks_within(needs, config_.max_cache_bytes),
                ": raise policy.generation.kv_cache_gb or lower max_new_tokens");
  NRL_CHECK_ARG(!for_all || fits_all, "the keys and values of ", sequences_.size(),
                " generations are to be kept over a change of the weights, which needs ",
                static_cast<double>(useful_bytes(needs)) / 1e9, " GB, but the cache may hold ",
                static_cast<double>(config_.max_cache_bytes) / 1e9,
                " GB: raise policy.generation.kv_cache_gb, or set recompute_kv_cache_after_weight_updates=true");
  if (!grows) return;
  cache_blocks_.clear();
  runner_->allocate_cache(wanted);
  cache_blocks_ = wanted;
}

/// As many states as these requests can use at once, or `for_all` of them; more are kept as they are.
void Engine::prepare_states(bool for_all) {
  if (!runner_->has_states()) return;
  const auto useful = static_cast<std::int64_t>(groups_.size() + sequences_.size());
  const std::int64_t at_once = for_all ? useful : std::min(useful, Scheduler::states_needed(config_.scheduler));
  const std::int64_t wanted = std::max<std::int64_t>(2, at_once);
  if (wanted <= states_) return;
  states_ = 0;
  runner_->allocate_states(wanted);
  states_ = wanted;
}

void Engine::release_cache() {
  if (paused_) give_up();
  NRL_CHECK(!busy_, "release_cache() was called while generate() runs");
  runner_->release_cache();
  cache_blocks_.clear();
  states_ = 0;
}

}  // namespace nemo_rl::generation
