// The generation engine: continuous batching over a ModelRunner. The requests of a batch are all known from the start.
//
// The result of a request depends only on its prompt, its parameters and its random key. It never depends on other
// requests, the batch size, chunk sizes, preemptions or the number of threads.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "generation/cache_size.h"
#include "generation/engine_step.h"

namespace nemo_rl::generation {

struct EngineConfig {
  SchedulerConfig scheduler;
  std::int64_t max_model_len = 0;  ///< maximum tokens of prompt and generation together; 0: no limit
  std::int64_t max_cache_bytes = std::int64_t{4} << 30;
  bool with_entropy = false;
};

/// One generation of prompt `prompt`.
struct Request {
  std::int64_t prompt = 0;
  SamplingParams params;
  RandomKey key;  ///< its position is ignored
};

struct Generation {
  std::vector<std::int64_t> token_ids;  ///< including the token that ended it
  std::vector<float> logprobs;          ///< of every token, under the distribution it was sampled from
  std::vector<float> entropies;         ///< of those distributions; zeros unless EngineConfig::with_entropy
  FinishReason finish_reason = FinishReason::none;
};

/// The point at which generate() stops in the middle of its generations, so that the model's weights can change.
struct Pause {
  std::int64_t after_tokens = 0;  ///< tokens after which each generation stops, at least 2; 0: never
  bool keep_cache = false;        ///< continue with the KV cache of the old weights; otherwise recompute it
};

/// Thrown if the interrupt callback returned true. All requests are dropped.
class GenerationInterrupted : public std::runtime_error {
 public:
  GenerationInterrupted() : std::runtime_error("generation was interrupted") {}
};

/// A callback that receives the indices of requests that have ended, and the tokens of each.
using Finished = std::function<void(const std::vector<std::int64_t>& requests,
                                    const std::vector<const std::vector<std::int64_t>*>& token_ids)>;

class Engine {
 public:
  Engine(std::shared_ptr<ModelRunner> runner, EngineConfig config, std::shared_ptr<const TokenBytes> token_bytes);
  ~Engine();

  /// Returns one Generation per request, in order. Requests for the same prompt share its prefill. A prompt that fills
  /// max_model_len gives an empty generation with finish reason `length`.
  ///
  /// All callbacks may be null. `interrupted` is called before each step. `finished` is called after a step with the
  /// requests that have just ended and their tokens, except after the last step. `drawn` is called for every token.
  ///
  /// If generations have reached `pause` and all others have ended, it returns an empty vector, and paused() is true.
  /// The tokens generated before the pause depend on `pause` alone, because it counts the tokens of each generation.
  ///
  /// Throws ValueError for an empty prompt, a token id outside the vocabulary, max_new_tokens < 1, bad sampling
  /// parameters, stop strings without token bytes, or a sequence that cannot fit the cache; RuntimeError for logits
  /// that are not finite; ValueError if the cache cannot keep all generations over a pause. After any exception the
  /// engine is empty and usable. A paused call that was not resumed is dropped.
  std::vector<Generation> generate(const std::vector<std::vector<std::int64_t>>& prompts,
                                   const std::vector<Request>& requests, const std::function<bool()>& interrupted,
                                   const Finished& finished = {}, const Drawn& drawn = {}, const Pause& pause = {});
  /// Continues all generations from a pause to their end. Callbacks as in generate(), whose `drawn` stays in use.
  std::vector<Generation> resume(const std::function<bool()>& interrupted, const Finished& finished = {});
  bool paused() const { return paused_; }

  /// Frees the cache; the next generate() allocates it again. A paused call is dropped.
  void release_cache();
  /// The number of blocks in the cache, of all pools.
  std::int64_t cache_blocks() const {
    return std::accumulate(cache_blocks_.begin(), cache_blocks_.end(), std::int64_t{0});
  }
  /// Sets the limit for the next generate(). A cache that is already larger is kept.
  void set_max_cache_bytes(std::int64_t bytes);
  /// Sets the token bytes. They are read only if a request has stop strings, so they may be set late.
  void set_token_bytes(std::shared_ptr<const TokenBytes> token_bytes);

  const EngineMetrics& metrics() const { return metrics_; }
  void reset_metrics() { metrics_ = {}; }
  const EngineConfig& config() const { return config_; }

 private:
  void add(const std::vector<std::vector<std::int64_t>>& prompts, const std::vector<Request>& requests,
           const Pause& pause);
  void check(const std::vector<std::vector<std::int64_t>>& prompts, const Request& request) const;
  PoolNeed need_of(const CachePool& pool, std::int64_t slots) const;
  void prepare_cache(bool for_all);
  void prepare_states(bool for_all);
  std::vector<Generation> run(const std::function<bool()>& interrupted, const Finished& finished);
  void give_up();
  void tell(const Finished& finished);

  std::shared_ptr<ModelRunner> runner_;
  EngineConfig config_;
  std::shared_ptr<const TokenBytes> token_bytes_;
  std::vector<std::int64_t> cache_blocks_;  // of each pool
  std::int64_t states_ = 0;
  bool busy_ = false;
  EngineMetrics metrics_;
  bool paused_ = false;
  // of the generate() call in progress
  Drawn drawn_;
  std::unique_ptr<Scheduler> scheduler_;
  std::vector<std::unique_ptr<PromptGroup>> groups_;
  std::vector<std::unique_ptr<Sequence>> sequences_;
  std::vector<const Sequence*> just_finished_;  // by the last step
};

}  // namespace nemo_rl::generation
