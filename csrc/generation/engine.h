// The generation engine: continuous batching of requests over a ModelRunner, for batches that are known from the start.
//
// The result of a request depends only on its prompt, its parameters and its random key. It never depends on other
// requests, the batch size, chunk sizes, preemptions or the number of threads.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "generation/engine_step.h"

namespace nemo_rl::generation {

struct EngineConfig {
  SchedulerConfig scheduler;
  std::int64_t max_model_len = 0;  ///< limit of prompt and generation together; none if 0
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
  std::vector<std::int64_t> token_ids;  ///< with the token that ended it
  std::vector<float> logprobs;          ///< of every token, under the distribution it was drawn from
  std::vector<float> entropies;         ///< of those distributions; zeros unless EngineConfig::with_entropy
  FinishReason finish_reason = FinishReason::none;
};

/// Where generate() stops in the middle of its generations, so that the model's weights can change.
struct Pause {
  std::int64_t after_tokens = 0;  ///< each generation stops after so many tokens, at least 2; 0: never
  bool keep_cache = false;        ///< keys and values of the weights so far are read on, not computed again
};

/// Thrown when the interrupt callback returned true. All requests were given up.
class GenerationInterrupted : public std::runtime_error {
 public:
  GenerationInterrupted() : std::runtime_error("generation was interrupted") {}
};

/// Requests (by index) that have ended, and the tokens of each.
using Finished = std::function<void(const std::vector<std::int64_t>& requests,
                                    const std::vector<const std::vector<std::int64_t>*>& token_ids)>;

class Engine {
 public:
  Engine(std::shared_ptr<ModelRunner> runner, EngineConfig config, std::shared_ptr<const TokenBytes> token_bytes);
  ~Engine();

  /// One Generation for every request, in order. Requests of one prompt share its prefill. A prompt that fills
  /// max_model_len yields an empty generation that ended by length.
  ///
  /// `interrupted` (may be null) is asked once a step. `finished` (may be null) is told after a step which requests
  /// have just ended, with their tokens, unless none is left. `drawn` (may be null) is told every token.
  ///
  /// Returns none, and paused() is true, when generations have reached `pause` and all others have ended. Which tokens
  /// are generated before it depends on `pause` alone, since it counts the tokens of each generation.
  ///
  /// Throws ValueError for an empty prompt, a token id outside the vocabulary, max_new_tokens < 1, bad sampling
  /// parameters, stop strings without token bytes, or a sequence that cannot fit the cache; RuntimeError for logits
  /// that are not finite; ValueError where the cache cannot keep all generations over a pause. Whatever is thrown, the
  /// engine is empty and usable afterwards. A paused call that nobody resumed is given up.
  std::vector<Generation> generate(const std::vector<std::vector<std::int64_t>>& prompts,
                                   const std::vector<Request>& requests, const std::function<bool()>& interrupted,
                                   const Finished& finished = {}, const Drawn& drawn = {}, const Pause& pause = {});
  /// Goes on from a pause to the end of every generation; callbacks as for generate(), whose `drawn` holds on.
  std::vector<Generation> resume(const std::function<bool()>& interrupted, const Finished& finished = {});
  bool paused() const { return paused_; }

  /// Frees the cache; the next generate() allocates it again. A paused call is given up.
  void release_cache();
  std::int64_t cache_blocks() const { return cache_blocks_; }
  /// For the next generate(); a cache that is larger already is kept.
  void set_max_cache_bytes(std::int64_t bytes);
  /// The table may come late: it is read only where a request has stop strings.
  void set_token_bytes(std::shared_ptr<const TokenBytes> token_bytes);

  const EngineMetrics& metrics() const { return metrics_; }
  void reset_metrics() { metrics_ = {}; }
  const EngineConfig& config() const { return config_; }

 private:
  void add(const std::vector<std::vector<std::int64_t>>& prompts, const std::vector<Request>& requests,
           const Pause& pause);
  void check(const std::vector<std::vector<std::int64_t>>& prompts, const Request& request) const;
  void prepare_cache(bool for_all);
  void prepare_states(bool for_all);
  std::vector<Generation> run(const std::function<bool()>& interrupted, const Finished& finished);
  void give_up();
  void tell(const Finished& finished);

  std::shared_ptr<ModelRunner> runner_;
  EngineConfig config_;
  std::shared_ptr<const TokenBytes> token_bytes_;
  std::int64_t cache_blocks_ = 0, states_ = 0;
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
