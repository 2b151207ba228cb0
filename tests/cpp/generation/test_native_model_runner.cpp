// The claim on which everything else rests: whatever the batch, chunks, packing, prefix sharing and threads, the
// engine's forward and the trainer's give the same bits.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "generation/native_model_runner.h"
#include "generation/small_model.h"
#include "kernels/log_softmax.h"
#include "runtime/tensor.h"
#include "trainer/trainer.h"

namespace nemo_rl {
namespace {

using Ids = std::vector<std::int64_t>;

/// Log-probabilities of tokens 1.. of every sequence, by the trainer.
std::vector<std::vector<float>> trainer_logprobs(const std::shared_ptr<model::DecoderModel>& model,
                                                 const std::vector<Ids>& sequences,
                                                 const std::vector<std::int64_t>& prompts, bool share,
                                                 double temperature) {
  std::vector<std::int64_t> ids, starts, lengths, wanted;
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    starts.push_back(static_cast<std::int64_t>(ids.size()));
    lengths.push_back(static_cast<std::int64_t>(sequences[b].size()));
    ids.insert(ids.end(), sequences[b].begin(), sequences[b].end());
    for (std::int64_t t = 0; t < lengths.back(); ++t) wanted.push_back(t >= prompts[b]);
  }
  std::vector<std::int64_t> rows(sequences.size());
  std::iota(rows.begin(), rows.end(), 0);
  const trainer::RowBatch batch{at::tensor(ids, at::kLong), at::tensor(starts, at::kLong),
                                at::tensor(lengths, at::kLong), at::tensor(wanted, at::kLong).to(at::kBool),
                                at::zeros({static_cast<std::int64_t>(rows.size())}, at::kLong)};
  auto out = at::zeros({static_cast<std::int64_t>(ids.size())});
  trainer::Trainer(model).forward(batch, rows, {temperature}, {share, false, false}, trainer::TokenOutputs{out});
  std::vector<std::vector<float>> result;
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    const auto* row = out.data_ptr<float>() + starts[b];
    result.emplace_back(row + prompts[b], row + lengths[b]);
  }
  return result;
}

/// The same by the engine's runner: all sequences at once, each fed in random chunks.
std::vector<std::vector<float>> runner_logprobs(const std::shared_ptr<model::DecoderModel>& model,
                                                const std::vector<Ids>& sequences,
                                                const std::vector<std::int64_t>& prompts, float temperature,
                                                std::mt19937& random) {
  generation::NativeModelRunner runner(model);
  const std::int64_t block = runner.block_size(), V = runner.vocab_size();
  std::vector<std::vector<std::int32_t>> tables(sequences.size());
  std::int32_t next = 0;
  for (std::size_t b = 0; b < sequences.size(); ++b)
    for (std::int64_t p = 0; p < static_cast<std::int64_t>(sequences[b].size()); p += block)
      tables[b].push_back(next++);
  runner.allocate_cache({next});
  std::vector<std::int64_t> done(sequences.size(), 0);
  std::vector<std::vector<float>> result(sequences.size());
  for (bool left = true; left;) {
    generation::ForwardBatch batch;
    std::vector<std::pair<std::size_t, std::int64_t>> wanted;
    left = false;
    for (std::size_t b = 0; b < sequences.size(); ++b) {
      const auto length = static_cast<std::int64_t>(sequences[b].size());
      if (done[b] == length) continue;
      left = true;
      const std::int64_t chunk = std::min<std::int64_t>(length - done[b], 1 + random() % 40);
      const auto start = static_cast<std::int64_t>(batch.token_ids.size());
      batch.slices.push_back({start, chunk, done[b], {tables[b]}});
      for (std::int64_t i = 0; i < chunk; ++i) {
        const std::int64_t t = done[b] + i;
        batch.token_ids.push_back(sequences[b][static_cast<std::size_t>(t)]);
        if (t + 1 >= prompts[b] && t + 1 < length) {
          batch.logits_rows.push_back(start + i);
          wanted.emplace_back(b, t + 1);
        }
      }
      done[b] += chunk;
    }
    if (!left) break;
    const auto logits = runner.forward(batch);
    for (std::size_t r = 0; r < wanted.size(); ++r) {
      const float* row = logits.data_ptr<float>() + static_cast<std::int64_t>(r) * V;
      const auto lse = kernels::log_sum_exp_row(row, V, temperature, false);
      const auto token = sequences[wanted[r].first][static_cast<std::size_t>(wanted[r].second)];
      result[wanted[r].first].push_back(kernels::token_logprob(row[token], temperature, lse));
    }
  }
  return result;
}

class Exactness : public ::testing::TestWithParam<std::tuple<bool, at::ScalarType>> {};

TEST_P(Exactness, LogprobsOfGenerationAndTrainingAreBitIdentical) {
  const auto [qwen3, dtype] = GetParam();
  const auto model = random_model(qwen3, dtype);
  std::mt19937 random(7);
  const int threads = at::get_num_threads();
  for (int round = 0; round < 12; ++round) {
    at::set_num_threads(1 + round % 2);
    const std::int64_t groups = 1 + random() % 5;
    std::vector<Ids> sequences;
    std::vector<std::int64_t> prompts;
    for (std::int64_t g = 0; g < groups; ++g) {
      const std::int64_t prompt = 1 + random() % (round < 10 ? 60 : 150);
      Ids start(static_cast<std::size_t>(prompt));
      for (auto& id : start) id = static_cast<std::int64_t>(random() % 131);
      for (std::uint32_t i = 0, n = 1 + random() % 8; i < n; ++i) {
        sequences.push_back(start);
        for (std::uint32_t k = 0, more = 1 + random() % (round < 10 ? 50 : 150); k < more; ++k)
          sequences.back().push_back(static_cast<std::int64_t>(random() % 131));
        prompts.push_back(prompt);
      }
    }
    const double temperature = round % 3 == 0 ? 1.0 : 0.7;
    const auto packed = trainer_logprobs(model, sequences, prompts, false, temperature);
    EXPECT_EQ(packed, trainer_logprobs(model, sequences, prompts, true, temperature))
        << "prefix sharing, round " << round;
    EXPECT_EQ(packed, runner_logprobs(model, sequences, prompts, static_cast<float>(temperature), random))
        << "engine, round " << round;
    for (std::size_t b = 0; b < sequences.size(); b += 3)
      EXPECT_EQ(packed[b], trainer_logprobs(model, {sequences[b]}, {prompts[b]}, false, temperature)[0])
          << "alone, round " << round;
  }
  at::set_num_threads(threads);
}

INSTANTIATE_TEST_SUITE_P(Models, Exactness,
                         ::testing::Combine(::testing::Bool(), ::testing::Values(at::kFloat, at::kBFloat16)));

}  // namespace
}  // namespace nemo_rl
