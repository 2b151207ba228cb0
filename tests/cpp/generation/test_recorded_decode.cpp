// Decode steps through RecordedSteps: padded rows and work that is done again from the step's own arrays give the bits
// of plain steps.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "generation/fake_recorded_work.h"
#include "generation/native_model_runner.h"
#include "generation/small_model.h"
#include "runtime/tensor.h"

namespace nemo_rl {
namespace {

using generation::ForwardBatch;

constexpr std::int64_t kBlocks = 3;  ///< cache blocks of a sequence

/// Sequence b has cache blocks b, B + b, 2B + b.
std::vector<std::int32_t> table_of(std::int64_t b, std::int64_t B) {
  std::vector<std::int32_t> table;
  for (std::int64_t i = 0; i < kBlocks; ++i) table.push_back(static_cast<std::int32_t>(i * B + b));
  return table;
}

std::int64_t token(std::int64_t b, std::int64_t position) { return (b * 37 + position * 11 + 5) % 131; }

/// The step in which sequences first..last get `length` tokens from `position` on.
ForwardBatch step_of(std::int64_t first, std::int64_t last, std::int64_t B, std::int64_t position,
                     std::int64_t length) {
  ForwardBatch batch;
  for (std::int64_t b = first; b < last; ++b) {
    const auto start = static_cast<std::int64_t>(batch.token_ids.size());
    batch.slices.push_back({start, length, position, {table_of(b, B)}});
    for (std::int64_t i = 0; i < length; ++i) batch.token_ids.push_back(token(b, position + i));
    batch.logits_rows.push_back(start + length - 1);
  }
  return batch;
}

/// Logits of a run: a prompt of 5 tokens each, then decode steps of fewer and fewer sequences.
std::vector<at::Tensor> decode(generation::NativeModelRunner& runner, std::int64_t B) {
  std::vector<at::Tensor> logits;
  runner.allocate_cache({B * kBlocks});
  logits.push_back(runner.forward(step_of(0, B, B, 0, 5)).clone());
  for (std::int64_t position = 5, first = 0; first < B; ++position) {
    if (position % 9 == 0) first += 1 + B / 8;
    if (first < B) logits.push_back(runner.forward(step_of(first, B, B, position, 1)).clone());
  }
  return logits;
}

class RecordedDecode : public ::testing::TestWithParam<std::tuple<bool, at::ScalarType, std::int64_t>> {};

TEST_P(RecordedDecode, ReplayedCudaGraphsAreBitIdenticalToUncapturedDecodeSteps) {
  const auto [qwen3, dtype, B] = GetParam();
  const auto model = random_model(qwen3, dtype);
  generation::NativeModelRunner plain(model);
  generation::RecorderLog log;
  generation::NativeModelRunner recording(model, fake_recorder(log));
  const auto expected = decode(plain, B);
  for (int run = 0; run < 2; ++run) {
    const auto got = decode(recording, B);
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < got.size(); ++i)
      ASSERT_TRUE(at::equal(got[i], expected[i])) << "step " << i << " of run " << run;
    recording.release_cache();
  }
  const auto replays =
      std::count_if(log.events.begin(), log.events.end(), [](const auto& e) { return e.starts_with("replay"); });
  EXPECT_GT(replays, static_cast<std::int64_t>(expected.size())) << "of two runs of " << expected.size() << " steps";
  EXPECT_GE(log.count("drop"), 2) << "the cache was given back twice";
}

INSTANTIATE_TEST_SUITE_P(Models, RecordedDecode,
                         ::testing::Combine(::testing::Bool(), ::testing::Values(at::kFloat, at::kBFloat16),
                                            ::testing::Values(1, 3, 11, 21)));

TEST(RecordedDecode, StepsWithSeveralTokensPerSequenceAreNotCaptured) {
  const auto model = random_model(true, at::kFloat);
  generation::RecorderLog log;
  generation::NativeModelRunner runner(model, fake_recorder(log));
  runner.allocate_cache({6});
  for (int i = 0; i < 4; ++i) runner.forward(step_of(0, 2, 2, 2 * i, 2));
  EXPECT_TRUE(log.events.empty());
}

TEST(RecordedDecode, ReplayThrowsForTokensAndKvCacheBlocksOutOfRange) {
  const auto model = random_model(true, at::kFloat);
  generation::RecorderLog log;
  generation::NativeModelRunner runner(model, fake_recorder(log));
  runner.allocate_cache({6});
  for (int i = 0; i < 3; ++i) runner.forward(step_of(0, 2, 2, i, 1));
  auto bad = step_of(0, 2, 2, 3, 1);
  bad.token_ids[1] = 131;
  EXPECT_THROW(runner.forward(bad), std::invalid_argument);
  bad = step_of(0, 2, 2, 3, 1);
  bad.slices[1].block_tables = {{9}};
  EXPECT_THROW(runner.forward(bad), std::invalid_argument);
}

}  // namespace
}  // namespace nemo_rl
