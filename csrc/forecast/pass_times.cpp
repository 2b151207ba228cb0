#include "forecast/pass_times.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <map>
#include <random>

#include "common/check.h"
#include "generation/native_model_runner.h"
#include "ops/sampling.h"
#include "ops/weight_blocks.h"
#include "runtime/tensor.h"

namespace nemo_rl::forecast {
namespace {

constexpr double kDecodeWeights = 64e6;         ///< more than caches hold: a decode step reads them from memory
constexpr double kTrainWeights = 6e6;           ///< passes over many tokens are bound by arithmetic
constexpr double kMostWeights = 1e9;            ///< that are allocated
constexpr std::int64_t kMostCache = 256 << 20;  ///< bytes of the KV cache; longer ones are read again and again
constexpr double kPassWork = 4e9;               ///< multiply-adds of a pass: some hundredths of a second
constexpr double kEnough = 0.1;                 ///< seconds of measuring one kind of pass

/// Returns the seconds of f().
template <class F>
double seconds(const F& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Calls `parts`, which returns the seconds of its N parts, once to fill caches and buffers, and then up to five times.
/// Returns the median of each part.
template <std::size_t N, class F>
std::array<double, N> typical(const F& parts) {
  std::vector<std::array<double, N>> times;
  double sum = 0;
  parts();
  while (times.size() < 5 && sum < kEnough) sum += seconds([&] { times.push_back(parts()); });
  std::array<double, N> middle{};
  for (std::size_t n = 0; n < N; ++n) {
    std::ranges::sort(times, {}, [n](const auto& t) { return t[n]; });
    middle[n] = times[times.size() / 2][n];
  }
  return middle;
}

/// Returns the median seconds of f().
template <class F>
double typical_seconds(const F& f) {
  return typical<1>([&] { return std::array{seconds(f)}; })[0];
}

double weights(const model::ModelConfig& config) {
  const model::ParameterLayout layout(config);
  auto sum = static_cast<double>(layout.total);
  for (const auto& s : layout.blocks)
    if (s.shape.size() == 2) sum += static_cast<double>(s.shape[0] * s.shape[1]);
  return sum;
}

/// Returns a number of tokens for a pass. Fewer take another way through a product; experts get only some of them.
std::int64_t tokens_to_try(const model::ModelConfig& config) {
  const auto& e = config.experts;
  const double share = config.has_experts() ? static_cast<double>(e.chosen) / static_cast<double>(e.count) : 1;
  const auto tokens = static_cast<std::int64_t>(kPassWork / (weights(config) * share));
  return std::max<std::int64_t>(tokens, config.has_experts() ? 256 : 96);
}

/// Fills the weights with random numbers, and vectors, such as those of norms, with ones.
void fill(model::DecoderModel& model) {
  std::mt19937 draw(0);
  std::normal_distribution<float> normal(0.0f, 0.02f);
  const auto values = at::empty({65521}, at::kFloat);  // a prime: rows of a matrix differ
  for (std::int64_t i = 0; i < values.numel(); ++i) values.data_ptr<float>()[i] = normal(draw);
  const auto spread = [&](const at::Tensor& flat) {
    const auto source = values.to(flat.scalar_type());
    for (std::int64_t at = 0; at < flat.numel(); at += source.numel()) {
      const auto n = std::min(source.numel(), flat.numel() - at);
      flat.narrow(0, at, n).copy_(source.narrow(0, 0, n));
    }
  };
  spread(model.compute());
  for (const auto& s : model.layout().specs)
    if (s.shape.size() == 1) model.compute().narrow(0, s.offset, s.numel).fill_(1);
  for (const auto& s : model.layout().blocks) {
    if (s.shape.size() == 1) continue;
    const auto blocks = model.blocks(s);
    const auto row = at::empty({1, s.shape[1]}, at::kFloat);
    spread(row.view({-1}));
    ops::pack_blocks(row, blocks.narrow(0, 0, 1));
    blocks.narrow(0, 1, s.shape[0] - 1).copy_(blocks.narrow(0, 0, 1).expand({s.shape[0] - 1, -1}));
  }
  if (model.has_separate_masters()) model.masters().copy_(model.compute());
}

using Model = std::shared_ptr<model::DecoderModel>;

Model model_of(const model::ModelConfig& config, const Passes& passes) {
  // gradients, master weights and moments are as large as eight weights
  const bool trains_weights = passes.trains && !passes.lora;
  NRL_CHECK_ARG(weights(config) * (trains_weights ? 8 : 1) < kMostWeights, "a layer is too large to be tried");
  auto model = std::make_shared<model::DecoderModel>(config, passes.dtype, trains_weights);
  fill(*model);
  if (passes.lora) {
    auto lora = *passes.lora;
    lora.targets.clear();
    const auto add = [&](const std::string& name) {
      for (const auto& matrix : passes.lora->targets)
        if (name.ends_with("." + matrix + ".weight")) lora.targets.push_back(name);
    };
    for (const auto& s : model->layout().specs) add(s.name);
    for (const auto& s : model->layout().blocks) add(s.name);
    model->adapt(lora);
    model->masters().fill_(0.02);
    model->masters_changed();
  }
  return model;
}

/// A micro-batch of sequences that share no prompt.
trainer::RowBatch micro_batch(const Passes& passes, std::int64_t tokens, std::int64_t vocabulary) {
  const auto length = std::max<std::int64_t>(2, std::min(passes.length, tokens));
  const auto rows = std::max<std::int64_t>(1, tokens / length);
  const auto scored =
      std::clamp<std::int64_t>(std::llround(static_cast<double>(length) * passes.trained), 1, length - 1);
  trainer::RowBatch batch;
  batch.token_ids = at::arange(rows * length, at::kLong).remainder(vocabulary);
  batch.starts = at::arange(0, rows * length, length, at::kLong);
  batch.lengths = at::full({rows}, length, at::kLong);
  batch.group_ids = at::full({rows}, -1, at::kLong);
  const auto mask = at::zeros({rows, length}, at::kBool);
  mask.narrow(1, length - scored, scored).fill_(true);
  batch.token_mask = mask.view({-1});
  return batch;
}

void measure_training(const Model& model, double scale, const Passes& passes, PassTimes& times) {
  const auto& small = model->config();
  const auto count = std::min(passes.micro_batch, tokens_to_try(small));
  const auto batch = micro_batch(passes, count, small.vocab_size);
  const auto tokens = static_cast<double>(batch.token_ids.numel());
  std::vector<std::int64_t> rows;
  for (std::int64_t b = 0; b < batch.lengths.numel(); ++b) rows.push_back(b);
  trainer::Trainer trainer(model);
  const auto out = at::zeros({batch.token_ids.numel()}, at::kFloat);
  const auto scoring = small.value_head ? model::TokenScoring() : passes.sampling;
  // keep: of the last layer a pass that keeps nothing computes only what is scored, and the miniature has few layers
  const auto ahead = [&](const trainer::RowBatch& of) {
    trainer.forward(of, rows, scoring, {false, /*keep=*/true, passes.checkpoint}, {out, {}, {}});
  };
  auto unscored = passes;
  unscored.trained = 0;  // one token of each sequence
  const auto prompts = micro_batch(unscored, count, small.vocab_size);
  times.prefill = typical_seconds([&] { ahead(prompts); }) * scale / tokens;
  if (passes.scores) times.score = typical_seconds([&] { ahead(batch); }) * scale / tokens;
  if (!passes.trains) return;
  trainer::TokenLoss loss;
  loss.inputs.advantages = at::ones(out.sizes(), out.options());
  loss.inputs.generation_logprobs = at::zeros(out.sizes(), out.options());
  loss.inputs.token_mask = batch.token_mask.to(at::kFloat);
  loss.inputs.sample_mask = at::ones({batch.lengths.numel()}, at::kFloat);
  loss.inputs.global_valid_toks = at::full({}, tokens, at::kFloat);
  loss.inputs.global_valid_seqs = at::full({}, 1, at::kFloat);
  const auto gradient = at::full(out.sizes(), 1e-3, out.options());
  const bool fused = trainer.takes_token_loss(scoring);
  const trainer::ForwardOptions options{false, true, passes.checkpoint};
  const auto parts = typical<2>([&] {
    return std::array{
        seconds([&] { fused ? trainer.forward(batch, rows, scoring, options, out, loss) : ahead(batch); }),
        seconds([&] { fused ? trainer.backward() : trainer.backward({gradient, {}, {}}); })};
  });
  times.forward = parts[0] * scale / tokens;
  times.backward = parts[1] * scale / tokens;
  times.update = scale * typical_seconds([&] {
                   trainer.zero_grad();
                   trainer.step({}, 1.0);
                 });
}

using generation::ForwardBatch;

/// Decode steps on a cache whose blocks have been written.
ForwardBatch decode_batch(const generation::NativeModelRunner& runner, const DecodeStep& step, std::int64_t blocks) {
  ForwardBatch batch;
  std::int32_t next = 0, shared = 0;
  const auto spare = static_cast<std::int32_t>(blocks - step.rows);  // the last block of each row is its own
  const auto take = [&](std::int32_t& block) { return std::exchange(block, (block + 1) % spare); };
  for (std::int64_t i = 0; i < step.rows; ++i) {
    const auto context = step.prompt + step.own;
    batch.token_ids.push_back(i % runner.vocab_size());
    batch.slices.push_back({i, 1, context, {}, runner.has_states() ? i : -1});
    batch.logits_rows.push_back(i);
    auto& table = batch.slices.back().block_table;
    auto of_prompt = i % step.group == 0 ? (shared = next) : shared;
    for (std::int64_t at = 0; at + runner.block_size() <= context; at += runner.block_size()) {
      const bool is_own = at + runner.block_size() > step.prompt;
      table.push_back(take(is_own || i % step.group == 0 ? next : of_prompt));
    }
    table.push_back(static_cast<std::int32_t>(spare + i));
  }
  return batch;
}

void measure_generation(const Model& model, double scale, const Passes& passes, PassTimes& times) {
  using generation::NativeModelRunner;
  NativeModelRunner runner(model, {}, passes.packs ? 0 : NativeModelRunner::kNeverPack);
  for (const auto& step : passes.decode) {
    const auto each = (step.prompt + step.own) / runner.block_size() + 2;
    const auto blocks =
        std::min(step.rows * each, kMostCache / std::max<std::int64_t>(1, runner.bytes_per_block()) + 1) + step.rows +
        1;
    runner.allocate_cache(blocks);
    if (runner.has_states()) runner.allocate_states(step.rows);
    auto batch = decode_batch(runner, step, blocks);
    // memory that was never written is not read as other memory is
    for (std::int32_t block = 1; block < blocks; ++block)
      batch.copies.push_back({0, block, static_cast<std::int32_t>(runner.block_size())});
    for (std::int64_t i = 1; runner.has_states() && i < step.rows; ++i) batch.state_copies.push_back({0, i});
    std::vector<ops::RowDraw> draws;
    const kernels::SamplingRule rule{static_cast<float>(passes.sampling.temperature), passes.sampling.top_p,
                                     passes.sampling.top_k, false, runner.vocab_block()};
    for (std::int64_t i = 0; i < step.rows; ++i) draws.push_back({i, rule, 0.5});
    const auto once = [&] { ops::sample_rows(runner.forward(batch), draws, false); };
    once();
    batch.copies.clear(), batch.state_copies.clear();
    model->weights_changed();
    const double first = seconds(once);
    const double time = typical_seconds(once);
    times.decode.push_back(time * scale);
    if (times.decode.size() == 1) times.packing = std::max(0.0, first - time) * scale;
  }
}

}  // namespace

Miniature miniature(const model::ModelConfig& whole, double least) {
  std::map<std::array<bool, 5>, std::vector<model::LayerConfig>> kinds;
  for (const auto& l : whole.layers)
    kinds[{l.has_experts, l.is_recurrent, l.has_mixer, l.has_mlp, l.window > 0}].push_back(l);
  std::size_t rarest = whole.layers.size();
  for (const auto& [kind, layers] : kinds)
    if (10 * layers.size() >= whole.layers.size()) rarest = std::min(rarest, layers.size());
  for (std::size_t copies = 1;; ++copies) {
    Miniature small{whole};
    small.config.layers.clear();
    for (const auto& [kind, layers] : kinds) {
      const auto count = (layers.size() * copies + rarest / 2) / rarest;
      small.config.layers.insert(small.config.layers.end(), layers.begin(),
                                 layers.begin() + static_cast<std::ptrdiff_t>(count));
    }
    small.scale = static_cast<double>(whole.layers.size()) / static_cast<double>(small.config.layers.size());
    small.config.vocab_size =
        std::max<std::int64_t>(2, std::llround(static_cast<double>(whole.vocab_size) / small.scale));
    if (copies == rarest || weights(small.config) >= least) return small;
  }
}

PassTimes pass_times(const model::ModelConfig& config, const Passes& passes) {
  PassTimes times;
  const auto trained = miniature(config, kTrainWeights), decoding = miniature(config, kDecodeWeights);
  auto model = model_of(trained.config, passes);
  measure_training(model, trained.scale, passes, times);
  if (passes.decode.empty()) return times;
  if (decoding.scale != trained.scale) {
    auto frozen = passes;
    frozen.trains = false;
    if (passes.lora && passes.lora->merge) frozen.lora.reset();
    model = model_of(decoding.config, frozen);
  }
  measure_generation(model, decoding.scale, passes, times);
  return times;
}

}  // namespace nemo_rl::forecast
