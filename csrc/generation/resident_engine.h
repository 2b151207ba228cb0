// An engine with an open batch: requests join and leave it between two steps. It serves requests that arrive at any
// time, whereas Engine serves batches that are known from the start.
//
// As in Engine, the result of a request depends only on its prompt, its parameters and its random key.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "generation/cache_size.h"
#include "generation/engine_step.h"

namespace nemo_rl::generation {

struct ResidentConfig {
  SchedulerConfig scheduler;
  std::int64_t max_model_len = 0;  ///< maximum tokens of prompt and generation together
  std::int64_t max_cache_bytes = std::int64_t{4} << 30;
};

/// A token that a sequence has sampled, and whether the sequence ended with it.
struct DrawnToken {
  std::int64_t sequence = 0;
  std::int64_t token_id = 0;
  float logprob = 0;  ///< under the distribution it was sampled from
  FinishReason finish_reason = FinishReason::none;
  std::vector<kernels::SampledToken> likeliest;  ///< as many as the request asks for
};

/// Not thread-safe: one thread submits, cancels and steps.
class ResidentEngine {
 public:
  /// The cache has the size that the scheduler's slots can fill, at most max_cache_bytes. The first step allocates it.
  ResidentEngine(std::shared_ptr<ModelRunner> runner, ResidentConfig config,
                 std::shared_ptr<const TokenBytes> token_bytes);

  /// Adds one generation of `prompt` for every key; they share its prefill. Returns the number of the first; the others
  /// have the next numbers. Numbers are never reused. A generation ends at max_model_len at the latest. `adapted`: as
  /// in PromptGroup.
  ///
  /// Throws ValueError for an empty prompt, a token id outside the vocabulary, a prompt that leaves no room, invalid
  /// sampling parameters, stop strings without token bytes, or a sequence that cannot fit the cache.
  std::int64_t submit(std::vector<std::int64_t> prompt, const SamplingParams& params,
                      const std::vector<RandomKey>& keys, std::shared_ptr<const model::DecoderModel> adapted = nullptr);

  /// Removes a sequence and frees its blocks. Returns false if there is no such sequence (any more).
  bool cancel(std::int64_t sequence);

  bool has_work() const { return !sequences_.empty(); }
  /// Runs one step and returns its tokens; none if there is no work. After any exception the engine is empty and
  /// usable.
  std::vector<DrawnToken> step();

  /// Frees the cache; the next step allocates it again. Throws RuntimeError while there is work.
  void release_cache();

  /// Of all pools of the cache.
  std::int64_t num_blocks() const { return scheduler_.blocks().num_blocks(); }
  std::int64_t used_blocks() const { return scheduler_.blocks().num_used(); }
  std::int64_t num_sequences() const { return static_cast<std::int64_t>(sequences_.size()); }
  const ResidentConfig& config() const { return config_; }
  const EngineMetrics& metrics() const { return metrics_; }

 private:
  struct Member {
    std::shared_ptr<PromptGroup> group;
    std::unique_ptr<Sequence> sequence;
  };

  void forget(std::map<std::int64_t, Member>::iterator member);

  std::shared_ptr<ModelRunner> runner_;
  ResidentConfig config_;
  std::shared_ptr<const TokenBytes> token_bytes_;
  std::vector<std::int64_t> num_blocks_;  // of each pool
  Scheduler scheduler_;
  bool has_cache_ = false;
  std::int64_t next_sequence_ = 0, next_priority_ = 0;
  std::map<std::int64_t, Member> sequences_;
  EngineMetrics metrics_;
};

}  // namespace nemo_rl::generation
