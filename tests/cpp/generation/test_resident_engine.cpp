// Requests that join, leave and are preempted at any time get what they would get alone.
#include <gtest/gtest.h>

#include <map>

#include "fake_model_runner.h"
#include "generation/engine.h"
#include "generation/resident_engine.h"

namespace nemo_rl::generation {
namespace {

constexpr std::int64_t kVocab = 23, kBlock = 4, kLongest = 48;

std::vector<std::int64_t> prompt_of(std::int64_t seed, std::int64_t length) {
  std::vector<std::int64_t> out;
  for (std::int64_t i = 0; i < length; ++i)
    out.push_back(
        random_bits({3, RandomStream::init, static_cast<std::uint64_t>(seed), 0, static_cast<std::uint32_t>(i)})[0] %
        kVocab);
  return out;
}

RandomKey key_of(std::int64_t r) { return {9, RandomStream::eval, static_cast<std::uint64_t>(r), 0, 0}; }

SamplingParams params_of(std::int64_t r) {
  SamplingParams p;
  p.max_new_tokens = 1 + r % 17;
  p.rule.temperature = 1;
  p.rule.greedy = r % 3 == 0;
  return p;
}

/// The same request alone in an engine for batches.
Generation alone(std::int64_t r, const std::vector<std::int64_t>& windows = {0}) {
  Engine engine(std::make_shared<FakeModelRunner>(kVocab, kBlock, windows), EngineConfig{{1, 512}, kLongest}, nullptr);
  return engine.generate({prompt_of(r, 1 + r % 11)}, {{0, params_of(r), key_of(r)}}, {}).front();
}

struct Answer {
  std::vector<std::int64_t> tokens;
  std::vector<float> logprobs;
  FinishReason reason = FinishReason::none;
};

void collect(ResidentEngine& engine, std::map<std::int64_t, Answer>& answers) {
  for (const DrawnToken& d : engine.step()) {
    auto& a = answers[d.sequence];
    a.tokens.push_back(d.token_id);
    a.logprobs.push_back(d.logprob);
    a.reason = d.finish_reason;
  }
}

/// The windows of a model's pools, and a cache for little more than one long sequence.
struct SmallCache {
  std::vector<std::int64_t> windows;
  std::int64_t blocks;
};

class ResidentEngineCaches : public ::testing::TestWithParam<SmallCache> {};

TEST_P(ResidentEngineCaches, RequestsAddedAndCancelledInMidGenerationDoNotChangeOtherResponses) {
  const auto& [windows, blocks] = GetParam();
  const auto runner = std::make_shared<FakeModelRunner>(kVocab, kBlock, windows);
  runner->drafts = 12;
  ResidentEngine engine(runner, ResidentConfig{{6, 5}, kLongest, blocks * 1024}, nullptr);
  std::map<std::int64_t, Answer> answers;
  std::map<std::int64_t, std::int64_t> request_of;
  std::vector<std::int64_t> canceled;
  for (std::int64_t r = 0; r < 60; ++r) {
    request_of[engine.submit(prompt_of(r, 1 + r % 11), params_of(r), {key_of(r)})] = r;
    if (r % 7 == 3) {
      const std::int64_t leaves = request_of.rbegin()->first;
      if (r % 2) collect(engine, answers);  // so that it has begun
      if (engine.cancel(leaves)) {
        canceled.push_back(leaves);
        answers.erase(leaves);
      }
      EXPECT_FALSE(engine.cancel(leaves));
    }
    if (r % 3) collect(engine, answers);
  }
  while (engine.has_work()) collect(engine, answers);
  EXPECT_EQ(engine.used_blocks(), 0);
  if (windows.back() == 0) {  // behind a window sequences hardly grow
    EXPECT_GT(engine.metrics().preemptions, 0);
  }
  EXPECT_GT(canceled.size(), 3u);
  if (windows.back() == 1) {  // the text repeats itself
    EXPECT_GT(engine.metrics().accepted_draft_tokens, 0);
  }
  EXPECT_EQ(answers.size() + canceled.size(), request_of.size());
  for (const auto& [id, answer] : answers) {
    const Generation expected = alone(request_of.at(id), windows);
    EXPECT_EQ(answer.tokens, expected.token_ids) << "request " << request_of.at(id);
    EXPECT_EQ(answer.logprobs, expected.logprobs);
    EXPECT_EQ(answer.reason, expected.finish_reason);
  }
}

INSTANTIATE_TEST_SUITE_P(Windows, ResidentEngineCaches,
                         ::testing::Values(SmallCache{{0}, 14}, SmallCache{{0, 6}, 20}, SmallCache{{6}, 8},
                                           SmallCache{{1}, 8}));

TEST(ResidentEngine, CancellingASampleFreesOnlyItsKvCacheBlocks) {
  ResidentEngine engine(std::make_shared<FakeModelRunner>(kVocab, kBlock), ResidentConfig{{8, 512}, kLongest}, nullptr);
  SamplingParams params;
  params.max_new_tokens = 20;
  const auto first = engine.submit(prompt_of(1, 9), params, {key_of(0), key_of(1), key_of(2)});
  std::map<std::int64_t, Answer> answers;
  for (int i = 0; i < 3; ++i) collect(engine, answers);
  const auto before = engine.used_blocks();
  EXPECT_TRUE(engine.cancel(first + 1));
  EXPECT_LT(engine.used_blocks(), before);
  while (engine.has_work()) collect(engine, answers);
  EXPECT_EQ(engine.used_blocks(), 0);
  EXPECT_EQ(answers.at(first).tokens.size(), 20u);
  EXPECT_EQ(answers.at(first + 2).tokens.size(), 20u);
  EXPECT_NE(answers.at(first).tokens, answers.at(first + 2).tokens);
}

TEST(ResidentEngine, InvalidRequestsThrowAndTheEngineIsUsableAfterAModelFailure) {
  const auto runner = std::make_shared<FakeModelRunner>(kVocab, kBlock);
  ResidentEngine engine(runner, ResidentConfig{{4, 512}, kLongest}, nullptr);
  EXPECT_THROW(engine.submit({}, params_of(1), {key_of(1)}), std::invalid_argument);
  EXPECT_THROW(engine.submit({kVocab}, params_of(1), {key_of(1)}), std::invalid_argument);
  EXPECT_THROW(engine.submit({-1}, params_of(1), {key_of(1)}), std::invalid_argument);
  EXPECT_THROW(engine.submit(prompt_of(1, kLongest), params_of(1), {key_of(1)}), std::invalid_argument);
  EXPECT_THROW(engine.submit({1}, params_of(1), {}), std::invalid_argument);
  EXPECT_FALSE(engine.has_work());
  EXPECT_THROW(ResidentEngine(runner, ResidentConfig{{4, 512}, kLongest, 1024}, nullptr), std::invalid_argument);

  runner->fail_at_step = 2;
  engine.submit({1, 2}, params_of(8), {key_of(8)});
  engine.step();
  EXPECT_THROW(engine.release_cache(), std::exception);
  EXPECT_THROW(engine.step(), std::runtime_error);
  EXPECT_FALSE(engine.has_work());
  EXPECT_EQ(engine.used_blocks(), 0);
  engine.release_cache();
  std::map<std::int64_t, Answer> answers;
  const auto again = engine.submit(prompt_of(8, 1 + 8 % 11), params_of(8), {key_of(8)});
  while (engine.has_work()) collect(engine, answers);
  EXPECT_EQ(answers.at(again).tokens, alone(8).token_ids);
}

}  // namespace
}  // namespace nemo_rl::generation
