#include "generation/resident_engine.h"

#include <algorithm>

#include "common/check.h"

namespace nemo_rl::generation {
namespace {

/// The blocks of a pool that full slots use.
PoolNeed need_of(const CachePool& pool, std::int64_t block_size, const ResidentConfig& config) {
  const std::int64_t longest = config.max_model_len, chunk = config.scheduler.prefill_chunk_tokens;
  const std::int64_t least = Scheduler::blocks_needed(config.scheduler, pool.window, block_size,
                                                      /*prompt_length=*/1, longest);  // it does not end with a block
  const std::int64_t held = most_blocks(pool.window, block_size, longest, 1);
  const std::int64_t one = std::min(least, held + 1);  // one in reserve
  const std::int64_t limit = config.max_cache_bytes / std::max<std::int64_t>(pool.bytes_per_block, 1);
  const std::int64_t slots = std::min(config.scheduler.max_batch_size, limit / one + 1);
  return {pool, least, slots * one + most_blocks(pool.window, block_size, longest, chunk) - held};
}

/// As many blocks of each pool as full slots need, within the limit.
std::vector<std::int64_t> blocks_of(const ModelRunner& runner, const ResidentConfig& config) {
  NRL_CHECK_ARG(config.max_model_len >= 2, "max_model_len = ", config.max_model_len, ": expected at least 2");
  NRL_CHECK_ARG(config.max_cache_bytes > 0, "max_cache_bytes = ", config.max_cache_bytes,
                ": expected a positive number");
  NRL_CHECK_ARG(config.scheduler.max_batch_size >= 1, "max_batch_size = ", config.scheduler.max_batch_size,
                ": expected at least 1");
  std::vector<PoolNeed> needs;
  for (const CachePool& pool : runner.cache_pools()) needs.push_back(need_of(pool, runner.block_size(), config));
  NRL_CHECK_ARG(least_bytes(needs) <= config.max_cache_bytes, "one sequence of max_model_len = ", config.max_model_len,
                " tokens needs ", least_blocks(needs), " cache blocks (", static_cast<double>(least_bytes(needs)) / 1e9,
                " GB), but the cache may hold ", blocks_within(needs, config.max_cache_bytes),
                ": raise the cache's size or lower max_model_len");
  return divide_cache(needs, config.max_cache_bytes);
}

std::int64_t states_of(const ModelRunner& runner, const ResidentConfig& config) {
  return runner.has_states() ? Scheduler::states_needed(config.scheduler) : 0;
}

}  // namespace

ResidentEngine::ResidentEngine(std::shared_ptr<ModelRunner> runner, ResidentConfig config,
                               std::shared_ptr<const TokenBytes> token_bytes)
    : runner_(std::move(runner)),
      config_(config),
      token_bytes_(token_bytes ? std::move(token_bytes) : std::make_shared<const TokenBytes>()),
      num_blocks_(blocks_of(*runner_, config_)),
      scheduler_(config_.scheduler, pool_sizes(*runner_, num_blocks_), runner_->block_size(),
                 states_of(*runner_, config_)) {}

std::int64_t ResidentEngine::submit(std::vector<std::int64_t> prompt, const SamplingParams& params,
                                    const std::vector<RandomKey>& keys,
                                    std::shared_ptr<const model::DecoderModel> adapted) {
  check_prompt(0, prompt, runner_->vocab_size());
  check_sampling(params, *token_bytes_);
  NRL_CHECK_ARG(!keys.empty(), "a request for no generation");
  const auto group = std::make_shared<PromptGroup>();
  group->tokens = std::move(prompt);
  runner_->check_adapted(adapted.get());
  group->adapted = std::move(adapted);
  group->priority = next_priority_++;
  NRL_CHECK_ARG(group->length() < config_.max_model_len, "the prompt has ", group->length(),
                " tokens, which leaves no room for an answer: the longest sequence is ", config_.max_model_len);
  const std::int64_t first = next_sequence_;
  std::vector<std::unique_ptr<Sequence>> made;
  const std::int64_t room = config_.max_model_len - group->length();
  for (const RandomKey& key : keys) {
    auto s = std::make_unique<Sequence>();
    s->id = first + static_cast<std::int64_t>(made.size());
    s->group = group.get();
    s->params = params;
    s->key = key;
    s->max_length = group->length() + std::min(params.max_new_tokens, room);
    group->pending.push_back(s.get());
    group->members.push_back(s.get());
    made.push_back(std::move(s));
  }
  scheduler_.add(group.get());
  for (auto& s : made) {
    const std::int64_t id = s->id;
    sequences_.emplace(id, Member{group, std::move(s)});
  }
  next_sequence_ += static_cast<std::int64_t>(keys.size());
  metrics_.shared_prompt_tokens += static_cast<std::int64_t>(keys.size() - 1) * group->length();
  return first;
}

bool ResidentEngine::cancel(std::int64_t sequence) {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return false;
  scheduler_.remove(found->second.sequence.get());
  forget(found);
  return true;
}

void ResidentEngine::forget(std::map<std::int64_t, Member>::iterator member) {
  std::erase(member->second.group->members, member->second.sequence.get());
  sequences_.erase(member);
}

std::vector<DrawnToken> ResidentEngine::step() {
  std::vector<DrawnToken> drawn;
  if (!has_work()) return drawn;
  try {
    if (!has_cache_) {
      runner_->allocate_cache(num_blocks_);
      runner_->allocate_states(states_of(*runner_, config_));
    }
    has_cache_ = true;
    const auto note = [&](std::int64_t id, std::int64_t token) {
      const Sequence& s = *sequences_.at(id).sequence;
      drawn.push_back({id, token, s.logprobs.back(), s.finish_reason, s.likeliest});
    };
    for (const Sequence* s : run_step(*runner_, scheduler_, *token_bytes_, false, metrics_, note)) {
      forget(sequences_.find(s->id));
    }
  } catch (...) {
    scheduler_.abort();
    sequences_.clear();
    throw;
  }
  return drawn;
}

void ResidentEngine::release_cache() {
  NRL_CHECK(!has_work(), "release_cache() was called while ", sequences_.size(), " sequences are unfinished");
  runner_->release_cache();
  has_cache_ = false;
}

}  // namespace nemo_rl::generation
