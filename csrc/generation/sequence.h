// One generation and the prompt it continues.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "common/random.h"
#include "generation/block_manager.h"
#include "generation/sampling_params.h"
#include "generation/state_slots.h"

namespace nemo_rl::model {
class DecoderModel;
}

namespace nemo_rl::generation {

enum class FinishReason : std::uint8_t { none = 0, stop_token = 1, stop_string = 2, length = 3 };

const char* finish_reason_name(FinishReason reason);

struct PromptGroup;

/// One of the generations of a prompt. Its tokens are the group's prompt and `generated`.
struct Sequence {
  std::int64_t id = 0;  ///< index of its request
  PromptGroup* group = nullptr;
  SamplingParams params;
  RandomKey key;                ///< position is filled in by random_key()
  std::int64_t max_length = 0;  ///< prompt and generation

  std::vector<std::int64_t> generated;
  std::vector<float> logprobs;
  std::vector<float> entropies;
  std::vector<kernels::SampledToken> likeliest;  ///< where the last token was drawn; params.num_likeliest of them
  FinishReason finish_reason = FinishReason::none;

  BlockTable blocks;                       ///< held while it runs
  std::int64_t cached = 0;                 ///< positions whose keys and values lie in `blocks`
  std::int64_t state = StateSlots::kNone;  ///< slot of its states behind these positions, held while it runs
  std::string text_tail;                   ///< see StopStrings::append

  bool finished() const { return finish_reason != FinishReason::none; }
  std::int64_t prompt_length() const;
  std::int64_t length() const { return prompt_length() + static_cast<std::int64_t>(generated.size()); }
  std::int64_t token(std::int64_t position) const;
  /// The key of the next token's draw: of this sample and position alone.
  RandomKey random_key() const;
  /// Adds a sampled token and decides whether the sequence ends with it: a stop token, else a stop string, else the
  /// limit. The token that ends it stays part of it.
  void append(const kernels::SampledToken& sampled, const TokenBytes& token_bytes);
};

/// A prompt and those of its generations that wait for a slot: because they have not begun, or were preempted.
struct PromptGroup {
  std::vector<std::int64_t> tokens;
  /// The model whose adapters compute these tokens, over the base that the
  /// runner's model shares with it; nullptr: the runner's model as it is.
  std::shared_ptr<const model::DecoderModel> adapted;
  std::int64_t priority = 0;               ///< order of arrival
  std::deque<Sequence*> pending;           ///< next to admit first
  BlockTable blocks;                       ///< the prompt's cache, held while generations wait for it
  std::int64_t cached = 0;                 ///< prompt positions in `blocks`
  std::int64_t state = StateSlots::kNone;  ///< slot of the prompt's states, held as `blocks` are

  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
  bool ready() const { return cached == length(); }
  /// Whether the prompt's last logits are still wanted: some generation has no token yet.
  bool awaits_first_token() const;
};

}  // namespace nemo_rl::generation
