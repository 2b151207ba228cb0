#include "generation/scheduler.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "generation/drafts.h"

namespace nemo_rl::generation {
namespace {

/// Adds `length` tokens of `group` from position `context` on to the batch; the last `num_logits` yield logits. Returns
/// the first of their rows, -1 for none.
template <class TokenAt>
std::int64_t add_slice(ForwardBatch& batch, const PromptGroup& group, const BlockTables& blocks, std::int64_t state,
                       std::int64_t context, std::int64_t length, std::int64_t num_logits, TokenAt token_at) {
  const auto start = static_cast<std::int64_t>(batch.token_ids.size());
  batch.slices.push_back({start, length, context, blocks, state, group.adapted.get()});
  for (std::int64_t i = 0; i < length; ++i) batch.token_ids.push_back(token_at(context + i));
  if (num_logits == 0) return -1;
  const auto row = static_cast<std::int64_t>(batch.logits_rows.size());
  for (std::int64_t i = length - num_logits; i < length; ++i) batch.logits_rows.push_back(start + i);
  return row;
}

}  // namespace

Scheduler::Scheduler(SchedulerConfig config, const std::vector<BlockPools::Size>& pools, std::int64_t block_size,
                     std::int64_t num_states)
    : config_(config), blocks_(pools, block_size), states_(num_states) {
  NRL_CHECK_ARG(config.max_batch_size >= 1, "max_batch_size = ", config.max_batch_size, ": expected at least 1");
  NRL_CHECK_ARG(config.prefill_chunk_tokens >= 1, "prefill_chunk_tokens = ", config.prefill_chunk_tokens,
                ": expected at least 1");
}

std::int64_t Scheduler::blocks_needed(const SchedulerConfig& config, std::int64_t window, std::int64_t block_size,
                                      std::int64_t prompt_length, std::int64_t max_length) {
  const std::int64_t partial = prompt_length % block_size ? 1 : 0;  // the prompt's own last block beside the copy
  return most_blocks(window, block_size, max_length - 1, config.prefill_chunk_tokens) + partial;
}

void Scheduler::add(PromptGroup* group) {
  for (const Sequence* s : group->pending) {
    for (std::size_t p = 0; p < blocks_.size(); ++p) {
      const BlockManager& pool = blocks_[p];
      const std::int64_t needed =
          blocks_needed(config_, pool.window(), pool.block_size(), group->length(), s->max_length);
      NRL_CHECK_ARG(needed <= pool.num_blocks(), "a sequence of up to ", s->max_length, " tokens needs ", needed,
                    " cache blocks of ", pool.block_size(), " tokens, but the cache holds ", pool.num_blocks(),
                    ": raise policy.generation.kv_cache_gb or lower max_new_tokens");
    }
  }
  if (!group->pending.empty()) queue_.push_back(group);
}

StepPlan Scheduler::schedule(std::int64_t draft_rows) {
  StepPlan plan;
  while (!resumed_.empty() && num_running() < config_.max_batch_size) {
    running_.push_back(resumed_.front());
    resumed_.pop_front();
  }
  feed_running(plan, draft_rows);
  admit(plan);
  NRL_CHECK(!plan.slices.empty() || !has_unfinished(), "the scheduler found nothing to do with ", running_.size(),
            " running and ", queue_.size(), " waiting; ", blocks_.num_blocks() - blocks_.num_used(), " of ",
            blocks_.num_blocks(), " blocks free");
  return plan;
}

void Scheduler::feed_running(StepPlan& plan, std::int64_t draft_rows) {
  const std::int64_t room = running_.empty() ? 0 : draft_rows / num_running() - 1;
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Sequence* const s = running_[i];
    const std::int64_t rest = s->length() - s->cached;
    const std::int64_t length = rest == 1 ? 1 : std::min(rest, budget(plan));
    if (length <= 0) continue;
    if (rest == 1) take_drafts(s, room);
    bool dropped = false;
    while (!dropped && !blocks_.extend(s->blocks, s->cached + length)) {
      if (drop_waiting_prompt(nullptr)) continue;
      NRL_CHECK(running_.size() > 1, "the cache is too small for one sequence");
      dropped = running_.back() == s;
      preempt_last();  // comes later in this loop than s, or is s: no planned slice is touched
    }
    if (!dropped) plan_sequence(s, length, plan);
  }
}

/// Takes at most `room` drafts and the blocks for them. After wrong drafts only a longer repetition is trusted.
void Scheduler::take_drafts(Sequence* s, std::int64_t room) {
  room = std::min(room, s->max_length - s->length() - 1);
  if (pause_after_ > 0) room = std::min(room, pause_after_ - static_cast<std::int64_t>(s->generated.size()) - 1);
  if (room <= 0) return;
  s->drafts = draft_tokens(*s, std::min(kLongestMatch, 1 + s->wrong_drafts), room);
  if (!blocks_.extend(s->blocks, s->length() + static_cast<std::int64_t>(s->drafts.size()))) s->drafts.clear();
}

void Scheduler::admit(StepPlan& plan) {
  std::int64_t promised = 0;  // slots for generations whose prompts are in this step
  for (std::size_t i = 0; i < queue_.size();) {
    if (num_running() + promised >= config_.max_batch_size) return;
    PromptGroup* const group = queue_[i];
    if (!group->ready()) {
      if (!prefill(group, plan)) return;
      promised += static_cast<std::int64_t>(group->pending.size());
      ++i;
      continue;
    }
    while (!group->pending.empty() && num_running() + promised < config_.max_batch_size) {
      if (!admit_next(group, plan)) return;
    }
    if (group->pending.empty()) queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

bool Scheduler::prefill(PromptGroup* group, StepPlan& plan) {
  const std::int64_t length = std::min(group->length() - group->cached, budget(plan));
  if (length <= 0) return false;
  const std::int64_t held = blocks_.blocks_for(group->cached);
  const std::int64_t states = states_.enabled() && group->state == StateSlots::kNone ? 1 : 0;
  if (!make_room(blocks_.blocks_for(group->length()) - held, blocks_.blocks_for(group->cached + length) - held, states,
                 group, plan))
    return false;
  if (states > 0) group->state = states_.take();
  NRL_CHECK(blocks_.extend(group->blocks, group->cached + length), "no blocks after making room");
  const bool last = group->cached + length == group->length();
  const std::int64_t row =
      add_slice(plan.batch, *group, group->blocks, group->state, group->cached, length,
                last && group->awaits_first_token() ? 1 : 0, [&](std::int64_t p) { return group->tokens[p]; });
  plan.slices.push_back({nullptr, group, length, row});
  plan.prefill_tokens += length;
  return true;
}

bool Scheduler::admit_next(PromptGroup* group, StepPlan& plan) {
  Sequence* const s = group->pending.front();
  const std::int64_t P = group->length(), rest = s->length() - P;
  const std::int64_t length = rest == 1 ? 1 : std::min(rest, budget(plan));
  if (length <= 0) return false;
  const bool takes_over = group->pending.size() == 1;  // nobody else waits for the prompt's blocks: no copy
  const std::int64_t copy = !takes_over && P % blocks_.block_size() ? 1 : 0;
  const std::int64_t states = !takes_over && states_.enabled() ? 1 : 0;
  const std::int64_t blocks = copy + blocks_.blocks_for(P + length) - blocks_.blocks_for(P);
  if (!make_room(blocks, blocks, states, group, plan)) return false;
  if (takes_over) {
    s->blocks = std::move(group->blocks);
    s->state = std::exchange(group->state, StateSlots::kNone);
    group->blocks.clear();
    group->cached = 0;
  } else {
    s->blocks = blocks_.fork(group->blocks, P, plan.batch.copies);
    s->state = states_.take();
    if (states > 0) plan.batch.state_copies.push_back({group->state, s->state});
  }
  s->cached = P;
  NRL_CHECK(blocks_.extend(s->blocks, P + length), "no blocks after making room");
  group->pending.pop_front();
  running_.push_back(s);
  plan_sequence(s, length, plan);
  return true;
}

/// Whether `blocks` of the pools without a window, `blocks_behind_windows` of the others, and `states` may be taken for
/// something new: each running sequence keeps one in reserve, so that admitting does not make it preempt a moment
/// later. With nothing running, waiting prompts other than `keep` give way.
bool Scheduler::make_room(std::int64_t blocks, std::int64_t blocks_behind_windows, std::int64_t states,
                          const PromptGroup* keep, const StepPlan& plan) {
  const bool idle = running_.empty() && plan.slices.empty();
  const std::int64_t reserve = static_cast<std::int64_t>(running_.size());
  const auto fits = [&] {
    for (std::size_t p = 0; p < blocks_.size(); ++p)
      if (blocks_[p].num_free() < (blocks_[p].window() > 0 ? blocks_behind_windows : blocks) + reserve) return false;
    return states_.num_free() >= states;
  };
  while (!fits()) {
    if (!idle || !drop_waiting_prompt(keep)) return false;
  }
  return true;
}

/// Frees the cache of the last prompt in the queue that holds any.
bool Scheduler::drop_waiting_prompt(const PromptGroup* keep) {
  for (auto it = queue_.rbegin(); it != queue_.rend(); ++it) {
    if (*it == keep || (*it)->blocks.empty()) continue;
    release_prompt(*it);
    return true;
  }
  return false;
}

void Scheduler::release_prompt(PromptGroup* group) {
  blocks_.release(group->blocks);
  states_.release(group->state);
  group->cached = 0;
}

/// A state is given up as cached keys and values are: the sequence computes it again.
void Scheduler::preempt_last() {
  Sequence* const s = running_.back();
  running_.pop_back();
  give_up(s);
  s->cached = 0;
  wait_again(s);
  ++preemptions_;
}

/// Puts a sequence without blocks back to its group, and that in the queue.
void Scheduler::wait_again(Sequence* s) {
  PromptGroup* const group = s->group;
  if (group->pending.empty()) {
    const auto behind =
        std::find_if(queue_.begin(), queue_.end(), [&](const PromptGroup* g) { return g->priority > group->priority; });
    queue_.insert(behind, group);
  }
  group->pending.push_front(s);
}

void Scheduler::pause_after(std::int64_t tokens, bool keep_cache) {
  NRL_CHECK_ARG(tokens >= 2, "pause_after = ", tokens, ": expected at least 2");  // the first comes with the prompt
  pause_after_ = tokens;
  pause_keeps_cache_ = keep_cache;
}

void Scheduler::pause_due() {
  if (pause_after_ == 0) return;
  std::erase_if(running_, [&](Sequence* s) {
    if (static_cast<std::int64_t>(s->generated.size()) < pause_after_) return false;
    paused_.push_back(s);
    if (!pause_keeps_cache_) {
      give_up(s);
      s->cached = 0;
    }
    return true;
  });
}

void Scheduler::resume() {
  pause_after_ = 0;
  for (auto s = paused_.rbegin(); s != paused_.rend(); ++s) {
    pause_keeps_cache_ ? resumed_.push_front(*s) : wait_again(*s);
  }
  paused_.clear();
}

void Scheduler::give_up(Sequence* s) {
  blocks_.release(s->blocks);
  states_.release(s->state);
}

void Scheduler::plan_sequence(Sequence* s, std::int64_t length, StepPlan& plan) {
  const bool last = s->cached + length == s->length();
  const auto drafts = static_cast<std::int64_t>(s->drafts.size());
  const std::int64_t row =
      add_slice(plan.batch, *s->group, s->blocks, s->state, s->cached, length + drafts, last ? 1 + drafts : 0,
                [&](std::int64_t p) { return p < s->length() ? s->token(p) : s->drafts[p - s->length()]; });
  plan.slices.push_back({s, nullptr, length, row});
  // what follows a prompt's prefill is decoding, be it one token or, after a preemption, several
  (length == 1 && last ? plan.decode_tokens : plan.prefill_tokens) += length;
  plan.draft_tokens += drafts;
}

void Scheduler::computed(const StepPlan& plan) {
  for (const PlannedSlice& slice : plan.slices) {
    std::int64_t& cached = slice.sequence ? slice.sequence->cached : slice.group->cached;
    cached += slice.length;
    blocks_.release_unread(slice.sequence ? slice.sequence->blocks : slice.group->blocks, cached);
  }
}

void Scheduler::retire_finished() {
  std::erase_if(running_, [&](Sequence* s) {
    if (s->finished()) give_up(s);
    return s->finished();
  });
  pause_due();
  std::erase_if(queue_, [&](PromptGroup* group) {  // a generation may end with its first token, before it had a slot
    std::erase_if(group->pending, [](const Sequence* s) { return s->finished(); });
    if (group->pending.empty()) release_prompt(group);
    return group->pending.empty();
  });
}

void Scheduler::remove(Sequence* sequence) {
  give_up(sequence);
  std::erase(running_, sequence);
  PromptGroup* const group = sequence->group;
  std::erase(group->pending, sequence);
  if (!group->pending.empty()) return;
  release_prompt(group);
  std::erase(queue_, group);
}

void Scheduler::abort() {
  for (Sequence* s : running_) give_up(s);
  for (Sequence* s : paused_) give_up(s);
  for (Sequence* s : resumed_) give_up(s);
  for (PromptGroup* group : queue_) release_prompt(group);
  running_.clear();
  paused_.clear();
  resumed_.clear();
  queue_.clear();
}

}  // namespace nemo_rl::generation
