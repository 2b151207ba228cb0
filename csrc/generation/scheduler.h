// The scheduler: decides which tokens the model computes in a step. It only assigns sequences and cache blocks, and
// touches no tensor.
//
// A prompt is prefilled once for its group; that pass yields the first token of all its generations. Each generation
// then takes a slot and a fork of the prompt's blocks. Slots are refilled as sequences finish. Running sequences have
// priority. If blocks run out, the blocks of waiting prompts are freed first. Then the sequence that was admitted last
// is preempted: it keeps its tokens, returns to its group, and is recomputed later. The sequence that has run longest
// is never preempted, so every step makes progress and there is no deadlock.
#pragma once
#include <cstdint>
#include <deque>
#include <vector>

#include "generation/block_pools.h"
#include "generation/sequence.h"

namespace nemo_rl::generation {

struct SchedulerConfig {
  std::int64_t max_batch_size = 64;         ///< slots: the number of sequences that run at the same time
  std::int64_t prefill_chunk_tokens = 512;  ///< maximum number of prefill tokens in a step
};

/// Part of a step: new tokens of one running sequence, or of one prompt.
struct PlannedSlice {
  Sequence* sequence = nullptr;
  PromptGroup* group = nullptr;
  std::int64_t length = 0;
  /// row of the step's logits, if these are the last known tokens; otherwise -1. Those of drafts follow it
  std::int64_t logits_row = -1;
};

struct StepPlan {
  ForwardBatch batch;
  std::vector<PlannedSlice> slices;  ///< of batch.slices, in order
  std::int64_t prefill_tokens = 0;
  std::int64_t decode_tokens = 0;  ///< without drafts
  std::int64_t draft_tokens = 0;
};

class Scheduler {
 public:
  /// `num_states`: 0 for a model without recurrent states, otherwise at least 2.
  Scheduler(SchedulerConfig config, const std::vector<BlockPools::Size>& pools, std::int64_t block_size,
            std::int64_t num_states = 0);

  /// Adds the group's pending sequences. Throws ValueError if a sequence cannot fit in the cache even alone.
  void add(PromptGroup* group);
  /// Whether a step has anything to compute; paused sequences are ignored.
  bool has_unfinished() const { return !running_.empty() || !queue_.empty() || !resumed_.empty(); }

  /// Pauses each sequence when it has generated `tokens` tokens (at least 2): it leaves its slot and is not computed
  /// until resume(). With `keep_cache` it keeps its blocks; otherwise it frees them, and its keys and values are
  /// recomputed after resume(), as after a preemption.
  void pause_after(std::int64_t tokens, bool keep_cache);
  /// Lets paused sequences continue until they end.
  void resume();
  std::int64_t num_paused() const { return static_cast<std::int64_t>(paused_.size()); }

  /// `draft_rows`: as in ModelRunner. Running sequences share these rows equally.
  StepPlan schedule(std::int64_t draft_rows = 0);
  /// Records what the model has computed. Must be called after the plan's forward pass.
  void computed(const StepPlan& plan);
  /// Removes sequences that have finished or pause from slots and groups. Called after their tokens were appended.
  void retire_finished();
  /// Removes one unfinished sequence in any state, and frees its blocks. Must not be called between schedule() and
  /// computed().
  void remove(Sequence* sequence);
  /// Forgets all sequences and frees all blocks.
  void abort();

  const BlockPools& blocks() const { return blocks_; }
  const StateSlots& states() const { return states_; }
  /// The number of states that a full batch uses: for running sequences, and for prompts whose sequences are about to
  /// run.
  static std::int64_t states_needed(const SchedulerConfig& config) { return 2 * config.max_batch_size; }
  std::int64_t num_running() const { return static_cast<std::int64_t>(running_.size()); }
  std::int64_t preemptions() const { return preemptions_; }
  /// The maximum number of blocks of a pool that a sequence needs if it runs alone. Nothing reads keys and values of
  /// its last token, so they are never computed.
  static std::int64_t blocks_needed(const SchedulerConfig& config, std::int64_t window, std::int64_t block_size,
                                    std::int64_t prompt_length, std::int64_t max_length);

 private:
  void feed_running(StepPlan& plan, std::int64_t draft_rows);
  void take_drafts(Sequence* sequence, std::int64_t room);
  void admit(StepPlan& plan);
  bool prefill(PromptGroup* group, StepPlan& plan);
  bool admit_next(PromptGroup* group, StepPlan& plan);
  bool make_room(std::int64_t blocks, std::int64_t blocks_behind_windows, std::int64_t states, const PromptGroup* keep,
                 const StepPlan& plan);
  bool drop_waiting_prompt(const PromptGroup* keep);
  void preempt_last();
  void wait_again(Sequence* s);
  void pause_due();
  void give_up(Sequence* sequence);
  void release_prompt(PromptGroup* group);
  void plan_sequence(Sequence* sequence, std::int64_t length, StepPlan& plan);
  std::int64_t budget(const StepPlan& plan) const { return config_.prefill_chunk_tokens - plan.prefill_tokens; }

  SchedulerConfig config_;
  BlockPools blocks_;
  StateSlots states_;
  std::vector<Sequence*> running_;  // in the order of admission
  std::deque<PromptGroup*> queue_;  // groups with pending sequences, by priority
  std::int64_t preemptions_ = 0;
  std::int64_t pause_after_ = 0;  // 0: never
  bool pause_keeps_cache_ = false;
  std::vector<Sequence*> paused_;
  std::deque<Sequence*> resumed_;  // they have kept their cache and wait for a slot
};

}  // namespace nemo_rl::generation
