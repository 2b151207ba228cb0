#include <gtest/gtest.h>

#include <stdexcept>

#include "generation/fake_recorded_work.h"
#include "generation/recorded_steps.h"

namespace nemo_rl::generation {
namespace {

using Events = std::vector<std::string>;
using Places = std::vector<const void*>;

/// Steps whose work leaves an event and may move memory.
struct Steps {
  RecorderLog log;
  RecordedSteps steps{fake_recorder(log)};
  char memory[4] = {};
  Places places = {memory};

  void run(std::int64_t rows, const std::function<void()>& more = [] {}) {
    steps.run(
        rows, [this] { return places; },
        [this, rows, more] {
          log.events.push_back("work " + std::to_string(rows));
          more();
        });
  }
};

TEST(RecordedRows, BatchSizesArePaddedToAFewGraphSizes) {
  const std::vector<std::pair<std::int64_t, std::int64_t>> expected = {
      {1, 1},     {2, 2},     {3, 4},     {4, 4},     {5, 8},     {8, 8},    {9, 16},
      {249, 256}, {256, 256}, {257, 272}, {512, 512}, {513, 513}, {700, 700}};
  for (const auto& [rows, padded] : expected) EXPECT_EQ(recorded_rows(rows), padded) << rows;
}

TEST(RecordedSteps, SecondStepOfABatchSizeIsCapturedAndLaterStepsAreReplayed) {
  Steps s;
  for (const std::int64_t rows : {8, 4, 8, 8, 4}) s.run(rows);
  EXPECT_EQ(s.log.events, (Events{"work 8", "work 4", "record 8", "replay 8", "work 8", "replay 8", "work 8",
                                  "record 4", "replay 4", "work 4"}));
}

TEST(RecordedSteps, StepsRunUncapturedWithoutGraphSupport) {
  RecordedSteps steps{RecordedSteps::Recorder()};
  int runs = 0;
  for (int i = 0; i < 3; ++i)
    steps.run(8, []() -> Places { throw std::logic_error("asked for places"); }, [&] { ++runs; });
  EXPECT_EQ(runs, 3);
}

TEST(RecordedSteps, StepsOfMoreThan512RowsAreNotCaptured) {
  Steps s;
  for (int i = 0; i < 3; ++i) s.run(513);
  EXPECT_EQ(s.log.events, (Events{"work 513", "work 513", "work 513"}));
}

TEST(RecordedSteps, ReallocatedBuffersDropEveryCapturedGraph) {
  Steps s;
  s.run(8), s.run(8);
  s.places = {s.memory + 1};
  s.log.events.clear();
  s.run(8);
  EXPECT_EQ(s.log.events, (Events{"drop", "work 8"}));
  s.run(8);
  EXPECT_EQ(s.log.count("record 8"), 1);
}

TEST(RecordedSteps, BuffersAllocatedDuringAStepDropGraphsOfOtherBatchSizes) {
  Steps s;
  s.run(8), s.run(8);
  s.log.events.clear();
  s.run(16, [&] { s.places.push_back(s.memory + 2); });
  EXPECT_EQ(s.log.events, (Events{"work 16", "drop"}));
  s.log.events.clear();
  s.run(8), s.run(16);  // 16 has run with these buffers, 8 has not
  EXPECT_EQ(s.log.events, (Events{"work 8", "record 16", "replay 16", "work 16"}));
}

TEST(RecordedSteps, FailedStepDoesNotCountAsTheFirstStepOfItsBatchSize) {
  Steps s;
  EXPECT_THROW(s.run(8, [] { throw std::runtime_error("out of memory"); }), std::runtime_error);
  s.log.events.clear();
  s.run(8);
  EXPECT_EQ(s.log.events, (Events{"work 8"}));
}

}  // namespace
}  // namespace nemo_rl::generation
