#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

#include "generation/scheduler.h"

namespace nemo_rl::generation {
namespace {

/// Groups of equal prompts driven by hand: every row of logits yields token 1.
struct Bench {
  Bench(SchedulerConfig config, std::int64_t num_blocks, std::int64_t block_size, std::int64_t num_states = 0)
      : scheduler(config, {{num_blocks}}, block_size, num_states) {}
  Bench(SchedulerConfig config, const std::vector<BlockPools::Size>& pools, std::int64_t block_size)
      : scheduler(config, pools, block_size) {}

  PromptGroup* add(std::int64_t prompt, std::int64_t G, std::int64_t max_new) {
    groups.push_back(std::make_unique<PromptGroup>());
    PromptGroup* g = groups.back().get();
    g->tokens.assign(prompt, 5);
    g->priority = static_cast<std::int64_t>(groups.size());
    for (std::int64_t i = 0; i < G; ++i) {
      sequences.push_back(std::make_unique<Sequence>());
      sequences.back()->group = g;
      sequences.back()->max_length = prompt + max_new;
      g->pending.push_back(sequences.back().get());
    }
    scheduler.add(g);
    return g;
  }

  StepPlan step() {
    StepPlan plan = scheduler.schedule();
    scheduler.computed(plan);
    for (const PlannedSlice& slice : plan.slices) {
      if (slice.logits_row < 0) continue;
      if (slice.sequence) {
        slice.sequence->append({1, 0, 0}, {});
        continue;
      }
      for (Sequence* s : slice.group->pending) {
        if (s->generated.empty()) s->append({1, 0, 0}, {});
      }
    }
    scheduler.retire_finished();
    return plan;
  }

  Scheduler scheduler;
  std::vector<std::unique_ptr<PromptGroup>> groups;
  std::vector<std::unique_ptr<Sequence>> sequences;
};

}  // namespace

TEST(Scheduler, LongPromptIsPrefilledInChunksWhileOtherSequencesDecode) {
  Bench bench({4, 10}, 100, 4);
  bench.add(3, 1, 20);
  bench.step();  // the short prompt, in full, and nothing else is there yet
  bench.add(25, 1, 4);
  const std::int64_t expected[] = {10, 10, 5};
  for (const std::int64_t tokens : expected) {
    const StepPlan plan = bench.step();
    EXPECT_EQ(plan.prefill_tokens, tokens);
    EXPECT_EQ(plan.decode_tokens, 1);
  }
  EXPECT_EQ(bench.step().decode_tokens, 2);
}

TEST(Scheduler, LastSampleOfAGroupReusesThePromptBlocksWithoutACopy) {
  Bench bench({4, 10}, 100, 4);
  PromptGroup* group = bench.add(6, 3, 3);
  bench.step();
  EXPECT_EQ(bench.scheduler.blocks().num_used(), 2);
  const StepPlan plan = bench.step();
  EXPECT_EQ(plan.batch.copies.size(), 2u);  // three generations, two copies of the partial block
  EXPECT_TRUE(group->blocks.empty());
  EXPECT_EQ(bench.scheduler.blocks().num_used(), 4);
}

TEST(Scheduler, SamplesBeyondTheMaximumOfConcurrentSequencesWaitWithTheirFirstToken) {
  Bench bench({2, 10}, 100, 4);
  PromptGroup* group = bench.add(6, 5, 3);
  bench.step();
  bench.step();
  EXPECT_EQ(bench.scheduler.num_running(), 2);
  EXPECT_EQ(group->pending.size(), 3u);
  for (const Sequence* s : group->pending) EXPECT_EQ(s->generated.size(), 1u);
}

TEST(Scheduler, OldestSequenceIsNeverPreempted) {
  Bench bench({8, 64}, 9, 2);  // room for one sequence of 14 and little more
  for (int i = 0; i < 4; ++i) bench.add(2, 2, 12);
  int steps = 0;
  const Sequence* oldest = bench.sequences[0].get();
  std::size_t length = 0;
  while (bench.scheduler.has_unfinished()) {
    ASSERT_LT(++steps, 1000);
    bench.step();
    if (!oldest->finished()) {
      if (steps > 1) {
        EXPECT_EQ(oldest->generated.size(), length + 1);
      }
      length = oldest->generated.size();
    }
  }
  EXPECT_GT(bench.scheduler.preemptions(), 0);
  EXPECT_EQ(bench.scheduler.blocks().num_used(), 0);
  for (const auto& s : bench.sequences) EXPECT_EQ(s->generated.size(), 12u);
}

TEST(Scheduler, BlocksOutsideTheSlidingWindowAreReleasedDuringGeneration) {
  // 100 tokens in blocks of 4: 25 in the pool without a window; with a window of 6 and chunks of 8, which reach 5
  // tokens back, at most 1 + ceil(12 / 4) = 4 blocks
  Bench bench({1, 8}, std::vector<BlockPools::Size>{{25, 0}, {4, 6}}, 4);
  bench.add(40, 1, 60);
  std::int64_t most = 0;
  while (bench.scheduler.has_unfinished()) {
    bench.step();
    most = std::max(most, bench.scheduler.blocks()[1].num_used());
  }
  EXPECT_EQ(bench.sequences[0]->generated.size(), 60u);
  EXPECT_EQ(most, 2) << "after a step: the 5 tokens that the next one reads";
  EXPECT_EQ(bench.scheduler.blocks().num_used(), 0);
  EXPECT_EQ(bench.scheduler.preemptions(), 0);
}

TEST(Scheduler, ResponsesKeepTheBlocksOfASharedPromptThatTheirSlidingWindowReads) {
  Bench bench({4, 100}, std::vector<BlockPools::Size>{{40, 0}, {40, 6}}, 4);
  const PromptGroup* group = bench.add(18, 3, 30);
  bench.step();  // positions 13.. are read by position 18: blocks 3 and 4
  EXPECT_EQ(group->blocks[1][2], kNoBlock);
  EXPECT_EQ(bench.scheduler.blocks()[1].num_used(), 2);
  bench.step();  // all run: block 3 is shared, block 4 was copied twice
  EXPECT_TRUE(group->blocks.empty());
  EXPECT_EQ(bench.scheduler.blocks()[1].num_used(), 4);
  EXPECT_EQ(bench.scheduler.blocks()[1].references(bench.sequences[0]->blocks[1][3]), 3);
  bench.step();  // position 19; the next one reads 15..20
  EXPECT_NE(bench.sequences[0]->blocks[1][3], kNoBlock);
  bench.step();  // position 20; the next one reads 16..21
  EXPECT_EQ(bench.sequences[0]->blocks[1][3], kNoBlock);
  EXPECT_EQ(bench.scheduler.blocks()[1].num_used(), 6) << "blocks 4 and 5 of each";
}

TEST(Scheduler, AbortFreesAllBlocksAndRequests) {
  Bench bench({2, 8}, 50, 4);
  for (int i = 0; i < 4; ++i) bench.add(10, 3, 12);
  for (int i = 0; i < 4; ++i) bench.step();
  EXPECT_GT(bench.scheduler.blocks().num_used(), 0);
  bench.scheduler.abort();
  EXPECT_EQ(bench.scheduler.blocks().num_used(), 0);
  EXPECT_FALSE(bench.scheduler.has_unfinished());
}

TEST(Scheduler, EachSequenceContinuesFromItsOwnRecurrentState) {
  // few blocks and few states: prompts are dropped and sequences preempted
  Bench bench({4, 7}, 12, 2, Scheduler::states_needed({4, 7}));
  for (const std::int64_t prompt : {2, 5, 9}) bench.add(prompt, 3, 12);
  std::vector<std::int64_t> tokens(8, 0);  // that each state has seen
  for (int steps = 0; bench.scheduler.has_unfinished(); ++steps) {
    ASSERT_LT(steps, 1000);
    const StepPlan plan = bench.step();
    for (const StateCopy& copy : plan.batch.state_copies)
      tokens.at(static_cast<std::size_t>(copy.to)) = tokens.at(static_cast<std::size_t>(copy.from));
    std::set<std::int64_t> used;
    for (const SequenceSlice& slice : plan.batch.slices) {
      EXPECT_TRUE(used.insert(slice.state).second);
      auto& seen = tokens.at(static_cast<std::size_t>(slice.state));
      if (slice.context_length == 0) seen = 0;
      EXPECT_EQ(seen, slice.context_length);
      seen += slice.query_length;
    }
  }
  EXPECT_GT(bench.scheduler.preemptions(), 0);
  EXPECT_EQ(bench.scheduler.states().num_used(), 0);
  for (const auto& s : bench.sequences) EXPECT_EQ(s->generated.size(), 12u);
}

TEST(Scheduler, RequestsAndSettingsThatCanNeverRunThrow) {
  Bench bench({2, 8}, 4, 4);
  EXPECT_THROW(bench.add(10, 1, 12), std::invalid_argument);
  EXPECT_THROW(Scheduler({0, 8}, {{4}}, 4), std::invalid_argument);
  EXPECT_THROW(Scheduler({2, 0}, {{4}}, 4), std::invalid_argument);
}

}  // namespace nemo_rl::generation
