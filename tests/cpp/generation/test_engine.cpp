#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "fake_model_runner.h"
#include "generation/engine.h"

namespace nemo_rl::generation {
namespace {

constexpr std::int64_t kVocab = 23;

struct Job {
  std::vector<std::vector<std::int64_t>> prompts;
  std::vector<Request> requests;
};

class Random {
 public:
  explicit Random(std::uint32_t seed) : seed_(seed) {}
  std::int64_t below(std::int64_t n) {
    return random_bits({seed_, RandomStream::init, 0, 0, counter_++})[0] % static_cast<std::uint32_t>(n);
  }
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + below(high - low + 1); }

 private:
  std::uint32_t seed_, counter_ = 0;
};

std::shared_ptr<const TokenBytes> letters() {
  auto table = std::make_shared<TokenBytes>();
  for (int v = 0; v < kVocab - 1; ++v) table->push_back(std::string(1 + v % 3, static_cast<char>('a' + v % 7)));
  table->push_back("");
  return table;
}

Job random_job(Random& random, std::int64_t max_prompt, std::int64_t max_new) {
  Job job;
  const std::int64_t P = random.between(1, 8);
  for (std::int64_t p = 0; p < P; ++p) {
    std::vector<std::int64_t> prompt(random.between(1, max_prompt));
    for (auto& t : prompt) t = random.below(kVocab);
    const std::int64_t G = random.between(1, 6);
    for (std::int64_t g = 0; g < G; ++g) {
      Request r;
      r.prompt = p;
      r.key = {7, RandomStream::train, static_cast<std::uint64_t>(100 + p), static_cast<std::uint32_t>(g), 0};
      r.params.max_new_tokens = random.between(1, max_new);
      r.params.rule = {0.5f + 0.25f * static_cast<float>(random.below(4)), random.below(2) ? 0.8f : 1.0f,
                       random.below(2) ? 6 : 0, random.below(5) == 0};
      if (random.below(2)) r.params.stop_token_ids = {random.below(kVocab), random.below(kVocab)};
      if (random.below(3) == 0)
        r.params.stop_strings = std::make_shared<StopStrings>(std::vector<std::string>{"ab", "ccc", "fga"});
      job.requests.push_back(r);
    }
    job.prompts.push_back(std::move(prompt));
  }
  return job;
}

/// The definition: one token after the other from the whole history, without cache or batch. After `pause` other
/// weights compute the history, or with keep_cache the new part of it.
Generation alone(const FakeModelRunner& model, const std::vector<std::int64_t>& prompt, const Request& r,
                 std::int64_t max_model_len, const TokenBytes& bytes, const Pause& pause = {}) {
  Generation out;
  std::vector<std::int64_t> tokens = prompt;
  std::vector<float> logits(kVocab), scratch_logits(kVocab);
  std::vector<kernels::FilterCandidate> candidates(kVocab);
  std::vector<std::int32_t> ids(kVocab);
  std::string text;
  while (out.finish_reason == FinishReason::none) {
    if (static_cast<std::int64_t>(out.token_ids.size()) == r.params.max_new_tokens ||
        (max_model_len > 0 && static_cast<std::int64_t>(tokens.size()) >= max_model_len)) {
      out.finish_reason = FinishReason::length;
      break;
    }
    std::vector<std::int64_t> cells = tokens;
    if (const auto N = static_cast<std::size_t>(pause.after_tokens); N > 0 && out.token_ids.size() >= N) {
      const std::size_t old = pause.keep_cache ? prompt.size() + N - 1 : 0;
      for (std::size_t i = old; i < cells.size(); ++i) cells[i] += 1000;
    }
    model.fill_logits(cells, logits.data());
    RandomKey key = r.key;
    key.position = static_cast<std::uint32_t>(tokens.size());
    const auto sampled = kernels::sample_row(logits.data(), kVocab, r.params.rule, random_uniform(key),
                                             {candidates.data(), scratch_logits.data(), ids.data()}, false);
    tokens.push_back(sampled.token);
    out.token_ids.push_back(sampled.token);
    out.logprobs.push_back(sampled.logprob);
    text += bytes.at(sampled.token);
    const auto& stops = r.params.stop_token_ids;
    if (std::count(stops.begin(), stops.end(), sampled.token)) out.finish_reason = FinishReason::stop_token;
    else if (r.params.stop_strings) {
      for (const char* s : {"ab", "ccc", "fga"}) {
        if (text.find(s) != std::string::npos) out.finish_reason = FinishReason::stop_string;
      }
    }
  }
  return out;
}

void expect_equal(const Generation& a, const Generation& b, std::size_t request) {
  EXPECT_EQ(a.token_ids, b.token_ids) << "request " << request;
  EXPECT_EQ(a.logprobs, b.logprobs) << "request " << request;
  EXPECT_EQ(a.finish_reason, b.finish_reason) << "request " << request;
}

EngineConfig config(std::int64_t slots, std::int64_t chunk, std::int64_t max_model_len = 0,
                    std::int64_t blocks = 1 << 20) {
  return {{slots, chunk}, max_model_len, blocks * 1024, false};
}

/// Of the pools of a model: every third has one pool without a window.
std::vector<std::int64_t> windows_of(std::uint32_t seed) {
  const std::int64_t window = 1 + seed / 3 % 12;
  if (seed % 3 == 0) return {0};
  return seed % 3 == 1 ? std::vector<std::int64_t>{0, window} : std::vector<std::int64_t>{window};
}

}  // namespace

TEST(Engine, ResponsesOfRandomBatchesEqualThoseOfEachRequestGeneratedAlone) {
  std::int64_t preemptions = 0, behind_windows = 0, copies_possible = 0, drafts = 0, accepted = 0;
  for (std::uint32_t seed = 0; seed < 800; ++seed) {
    Random random(seed);
    const std::int64_t block = random.between(1, 9), max_prompt = random.between(1, 40),
                       max_new = random.between(1, 30);
    const Job job = random_job(random, max_prompt, max_new);
    const std::int64_t max_model_len = random.below(3) ? 0 : random.between(5, 50);
    // from barely enough cache for one sequence to plenty
    const std::int64_t least = (max_prompt + max_new + block - 1) / block + 1;
    const std::int64_t blocks = least + (random.below(2) ? random.below(10) : random.below(200));
    const auto windows = windows_of(seed);
    const auto pools = static_cast<std::int64_t>(windows.size());
    auto runner = std::make_shared<FakeModelRunner>(kVocab, block, windows);
    const auto bytes = letters();
    const std::int64_t slots = random.between(1, 20), chunk = random.between(1, 64);
    runner->drafts = random.below(2) * random.between(2, 60);
    Engine engine(runner, config(slots, chunk, max_model_len, pools * blocks), bytes);
    const auto out = engine.generate(job.prompts, job.requests, nullptr);
    ASSERT_EQ(out.size(), job.requests.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      expect_equal(out[i], alone(*runner, job.prompts[job.requests[i].prompt], job.requests[i], max_model_len, *bytes),
                   i);
    }
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    EXPECT_LE(runner->largest_step, std::max(slots, runner->drafts) + chunk);
    EXPECT_LE(engine.metrics().peak_blocks, pools * blocks);
    drafts += engine.metrics().draft_tokens;
    accepted += engine.metrics().accepted_draft_tokens;
    preemptions += engine.metrics().preemptions;
    if (windows.back() > 0) behind_windows += engine.metrics().preemptions;
    copies_possible += block > 1;
  }
  EXPECT_GT(preemptions, 100);  // or the property was not put to the test
  EXPECT_GT(behind_windows, 20);
  EXPECT_GT(copies_possible, 100);
  EXPECT_GT(accepted, 100);
  EXPECT_GT(drafts, 2 * accepted);  // many are wrong
}

TEST(Engine, WeightUpdateInMidResponseTakesEffectAtTheSameTokenInEverySchedule) {
  std::int64_t paused = 0, kept = 0, preemptions = 0;
  for (std::uint32_t seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const std::int64_t block = random.between(1, 9);
    const Job job = random_job(random, 20, 30);
    const Pause pause{random.between(2, 12), random.below(2) == 0};
    const std::int64_t least = (20 + 30 + block - 1) / block + 1;
    const std::int64_t blocks = pause.keep_cache ? 1 << 20 : least + random.below(20);
    const auto windows = windows_of(seed);
    auto runner = std::make_shared<FakeModelRunner>(kVocab, block, windows);
    runner->drafts = random.below(2) * 40;
    const auto bytes = letters();
    const auto pools = static_cast<std::int64_t>(windows.size());
    Engine engine(runner, config(random.between(1, 20), random.between(1, 64), 0, pools * blocks), bytes);
    auto out = engine.generate(job.prompts, job.requests, nullptr, {}, {}, pause);
    if (engine.paused()) {
      runner->weights = 1;
      out = engine.resume(nullptr);
      ++paused;
      kept += pause.keep_cache;
    }
    ASSERT_FALSE(engine.paused());
    ASSERT_EQ(out.size(), job.requests.size());
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto& prompt = job.prompts[job.requests[i].prompt];
      expect_equal(out[i], alone(*runner, prompt, job.requests[i], 0, *bytes, pause), i);
    }
    ASSERT_FALSE(HasFailure()) << "seed " << seed;
    preemptions += engine.metrics().preemptions;
  }
  EXPECT_GT(paused, 200);
  EXPECT_GT(kept, 80);
  EXPECT_GT(preemptions, 50);
}

TEST(Engine, NewGenerateCallDropsAPausedOneAndPausingWithTheKvCacheKeptNeedsRoomForAllRequests) {
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 4);
  Engine engine(runner, config(16, 512, 0, 12), nullptr);
  Request r;
  r.params.max_new_tokens = 20;
  const auto whole = engine.generate({{1, 2}}, {r}, nullptr);
  EXPECT_TRUE(engine.generate({{1, 2}}, {r}, nullptr, {}, {}, {5, false}).empty());
  EXPECT_TRUE(engine.paused());
  EXPECT_EQ(engine.generate({{1, 2}}, {r}, nullptr)[0].token_ids, whole[0].token_ids);
  EXPECT_THROW(engine.resume(nullptr), std::runtime_error);
  EXPECT_TRUE(engine.generate({{1, 2}}, {r}, nullptr, {}, {}, {5, true}).empty());
  EXPECT_EQ(engine.resume(nullptr)[0].token_ids, whole[0].token_ids);
  EXPECT_THROW(engine.generate({{1, 2}}, {r, r, r}, nullptr, {}, {}, {5, true}), std::invalid_argument);
  EXPECT_TRUE(engine.generate({{1, 2}}, {r, r, r}, nullptr, {}, {}, {5, false}).empty());
  engine.release_cache();
  EXPECT_FALSE(engine.paused());
}

TEST(Engine, SharedPromptOfAGroupIsPrefilledOnce) {
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 4);
  Engine engine(runner, config(16, 512), nullptr);
  Job job;
  for (int p = 0; p < 2; ++p) {
    job.prompts.emplace_back(30, p + 1);
    for (std::uint32_t g = 0; g < 8; ++g) {
      Request r;
      r.prompt = p;
      r.key.sample = g;
      r.params.max_new_tokens = 5;
      job.requests.push_back(r);
    }
  }
  const auto out = engine.generate(job.prompts, job.requests, nullptr);
  const auto& m = engine.metrics();
  EXPECT_EQ(m.prefill_tokens, 60);
  EXPECT_EQ(m.shared_prompt_tokens, 2 * 7 * 30);
  EXPECT_EQ(m.decode_tokens, 16 * 4);  // the first of five tokens comes from the prefill, and the last is never fed
  EXPECT_EQ(m.generated_tokens, 16 * 5);
  EXPECT_EQ(m.steps, 5);
  EXPECT_EQ(runner->widest_step, 16);
  EXPECT_NE(out[0].token_ids, out[1].token_ids);
}

TEST(Engine, WaitingRequestsStartAsSoonAsOthersFinish) {
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 8);
  Engine engine(runner, config(4, 512), nullptr);
  Job job;
  std::int64_t tokens = 0;
  for (int p = 0; p < 40; ++p) {
    job.prompts.push_back({p % kVocab, 3});
    Request r;
    r.prompt = p;
    r.params.max_new_tokens = 1 + p % 10;
    tokens += r.params.max_new_tokens;
    job.requests.push_back(r);
  }
  engine.generate(job.prompts, job.requests, nullptr);
  // every step but those at the two ends works on four sequences
  EXPECT_LE(engine.metrics().steps, tokens / 4 + 14);
}

TEST(Engine, FinishReasonIsLengthStopTokenOrStopString) {
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 8);
  const auto bytes = letters();
  Engine engine(runner, config(4, 512, 0), bytes);
  Request greedy;
  greedy.params.rule.greedy = true;
  greedy.params.max_new_tokens = 6;
  const std::vector<std::vector<std::int64_t>> prompts{{1, 2, 3}};
  const auto free_run = engine.generate(prompts, {greedy}, nullptr)[0];
  ASSERT_EQ(free_run.token_ids.size(), 6u);
  EXPECT_EQ(free_run.finish_reason, FinishReason::length);

  Request stopped = greedy;
  stopped.params.stop_token_ids = {free_run.token_ids[5]};
  const auto by_token = engine.generate(prompts, {stopped}, nullptr)[0];
  EXPECT_EQ(by_token.finish_reason, FinishReason::stop_token);  // also when it comes just at the limit
  EXPECT_EQ(by_token.token_ids.back(), free_run.token_ids[5]);

  Request by_text = greedy;  // spans the second and third token
  const std::string text = bytes->at(free_run.token_ids[1]) + bytes->at(free_run.token_ids[2]);
  by_text.params.stop_strings = std::make_shared<StopStrings>(std::vector<std::string>{text});
  const auto by_string = engine.generate(prompts, {by_text}, nullptr)[0];
  EXPECT_EQ(by_string.finish_reason, FinishReason::stop_string);
  EXPECT_LE(by_string.token_ids.size(), 3u);
  EXPECT_TRUE(std::equal(by_string.token_ids.begin(), by_string.token_ids.end(), free_run.token_ids.begin()));
}

TEST(Engine, PromptThatFillsTheContextGetsAnEmptyResponse) {
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 8);
  Engine engine(runner, config(4, 512, 5), nullptr);
  Request first, second;
  first.params.max_new_tokens = second.params.max_new_tokens = 10;
  second.prompt = 1;
  const auto out = engine.generate({{1, 2, 3, 4, 5}, {1, 2, 3}}, {first, second}, nullptr);
  EXPECT_TRUE(out[0].token_ids.empty());
  EXPECT_EQ(out[0].finish_reason, FinishReason::length);
  EXPECT_EQ(out[1].token_ids.size(), 2u);
  EXPECT_EQ(out[1].finish_reason, FinishReason::length);
}

TEST(Engine, KvCacheIsKeptBetweenCallsAndGrowsForLongerRequests) {
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 8);
  Engine engine(runner, config(4, 512), nullptr);
  Request r;
  engine.generate({{1, 2}}, {r}, nullptr);
  engine.generate({{3, 4}}, {r}, nullptr);
  EXPECT_EQ(runner->allocations, 1);
  r.params.max_new_tokens = 200;
  engine.generate({{3, 4}}, {r}, nullptr);
  EXPECT_EQ(runner->allocations, 2);
  engine.release_cache();
  EXPECT_EQ(engine.cache_blocks(), 0);
  engine.generate({{3, 4}}, {r}, nullptr);
  EXPECT_EQ(runner->allocations, 3);
}

TEST(Engine, SlidingWindowAttentionGeneratesSequencesLongerThanTheKvCache) {
  // 200 tokens are 25 blocks of 8. A step of 4 tokens reads 9 more, which makes 3 blocks, and one for a copy.
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 8, std::vector<std::int64_t>{10});
  Engine engine(runner, config(4, 4, 0, 4), nullptr);
  Request r;
  r.params.max_new_tokens = 200;
  const std::vector<std::int64_t> prompt = {1, 2, 3};
  const auto out = engine.generate({prompt}, {r, r}, nullptr);
  EXPECT_EQ(engine.cache_blocks(), 4);
  for (std::size_t i = 0; i < 2; ++i) expect_equal(out[i], alone(*runner, prompt, r, 0, *letters()), i);
}

TEST(Engine, KvCacheOfSlidingWindowLayersHasOnlyTheBlocksThatConcurrentSequencesNeed) {
  // without a window 16 sequences of 8,000 + 192 tokens: 256 blocks each and one in reserve; behind a window of 512
  // each has 17 and one in reserve, and one step of 512 tokens 16 more
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 32, std::vector<std::int64_t>{0, 512});
  Engine engine(runner, config(16, 512), nullptr);
  Request r;
  std::vector<Request> requests;
  for (r.prompt = 0; r.prompt < 16; ++r.prompt) requests.push_back(r);
  for (auto& request : requests) request.params.max_new_tokens = 192;
  const std::vector<std::vector<std::int64_t>> prompts(16, std::vector<std::int64_t>(8000, 1));
  EXPECT_THROW(engine.generate(prompts, requests, [] { return true; }), GenerationInterrupted);
  EXPECT_EQ(engine.cache_blocks(), 16 * 257 + 16 * 18 + 16);
}

TEST(Engine, InvalidRequestsThrowAndLeaveTheEngineUsable) {
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 8);
  Engine engine(runner, config(4, 512, 0, 3), nullptr);
  const auto run = [&](std::vector<std::int64_t> prompt, auto change) {
    Request r;
    r.params.max_new_tokens = 4;
    change(r);
    return engine.generate({prompt}, {r}, nullptr);
  };
  const auto nothing = [](Request&) {};
  EXPECT_THROW(run({}, nothing), std::invalid_argument);
  EXPECT_THROW(run({1, kVocab}, nothing), std::invalid_argument);
  EXPECT_THROW(run({-1}, nothing), std::invalid_argument);
  EXPECT_THROW(run({1}, [](Request& r) { r.params.max_new_tokens = 0; }), std::invalid_argument);
  EXPECT_THROW(run({1}, [](Request& r) { r.params.max_new_tokens = 100; }), std::invalid_argument);  // 13 blocks of 3
  EXPECT_THROW(run({1}, [](Request& r) { r.params.rule.temperature = 0; }), std::invalid_argument);
  EXPECT_THROW(run({1}, [](Request& r) { r.params.rule.top_p = 0; }), std::invalid_argument);
  EXPECT_THROW(run({1}, [](Request& r) { r.prompt = 1; }), std::invalid_argument);
  EXPECT_EQ(run({1}, nothing)[0].token_ids.size(), 4u);
}

TEST(Engine, ModelFailureOrInterruptDropsAllRequestsAndLeavesTheEngineUsable) {
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 8);
  Engine engine(runner, config(4, 512), nullptr);
  Request r;
  r.params.max_new_tokens = 10;
  const auto expected = engine.generate({{1, 2}}, {r}, nullptr)[0];

  runner->fail_at_step = runner->steps + 3;
  EXPECT_THROW(engine.generate({{1, 2}}, {r}, nullptr), std::runtime_error);
  int asked = 0;
  EXPECT_THROW(engine.generate({{1, 2}}, {r}, [&] { return ++asked == 4; }), GenerationInterrupted);
  EXPECT_EQ(asked, 4);
  runner->nan_after = 5;
  EXPECT_THROW(engine.generate({{1, 2}}, {r}, nullptr), std::runtime_error);
  runner->nan_after = -1;
  EXPECT_EQ(engine.generate({{1, 2}}, {r}, nullptr)[0].token_ids, expected.token_ids);
}

TEST(Engine, EveryPartOfTheSamplingKeyChangesTheResponse) {
  auto runner = std::make_shared<FakeModelRunner>(kVocab, 8);
  Engine engine(runner, config(8, 512), nullptr);
  std::vector<Request> requests(5);
  for (auto& r : requests) r.params.max_new_tokens = 20;
  requests[1].key.seed = 1;
  requests[2].key.stream = RandomStream::val;
  requests[3].key.draw_id = 1;
  requests[4].key.sample = 1;
  const auto out = engine.generate({{5}}, requests, nullptr);
  for (std::size_t i = 0; i < out.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) EXPECT_NE(out[i].token_ids, out[j].token_ids);
  }
}

}  // namespace nemo_rl::generation
