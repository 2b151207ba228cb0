// A generation and the prompt that it continues.
#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "common/random.h"
#include "generation/model_runner.h"
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
  std::int64_t id = 0;  ///< the index of its request
  PromptGroup* group = nullptr;
  SamplingParams params;
  RandomKey key;                ///< random_key() sets its position
  std::int64_t max_length = 0;  ///< tokens of prompt and generation together

  std::vector<std::int64_t> generated;
  std::vector<float> logprobs;
  std::vector<float> entropies;
  std::vector<kernels::SampledToken> likeliest;  ///< the params.num_likeliest most likely choices for the last token
  FinishReason finish_reason = FinishReason::none;

  std::vector<std::int64_t> drafts;  ///< that the current step computes after the last token (generation/drafts.h)
  std::int64_t wrong_drafts = 0;     ///< steps in a row whose first draft was wrong

  BlockTables blocks;                      ///< held while the sequence runs
  std::int64_t cached = 0;                 ///< number of positions whose keys and values are in `blocks`
  std::int64_t state = StateSlots::kNone;  ///< slot of the recurrent states after them, held while the sequence runs
  std::string text_tail;                   ///< see StopStrings::append

  bool finished() const { return finish_reason != FinishReason::none; }
  std::int64_t prompt_length() const;
  std::int64_t length() const { return prompt_length() + static_cast<std::int64_t>(generated.size()); }
  std::int64_t token(std::int64_t position) const;
  /// The random key of the next token, or of the one `ahead` tokens later. It depends only on the sample and the
  /// position.
  RandomKey random_key(std::int64_t ahead = 0) const;
  /// Appends a sampled token and decides whether the sequence ends with it: by a stop token, otherwise by a stop
  /// string, otherwise by the length limit. The token that ends a sequence stays part of it.
  void append(const kernels::SampledToken& sampled, const TokenBytes& token_bytes);
};

/// A prompt and those of its generations that wait for a slot, because they have not begun or were preempted.
struct PromptGroup {
  std::vector<std::int64_t> tokens;
  /// The model whose adapters are used for these tokens; it shares its base weights with the runner's model. nullptr:
  /// the runner's model itself.
  std::shared_ptr<const model::DecoderModel> adapted;
  std::int64_t priority = 0;               ///< order of arrival
  std::vector<const Sequence*> members;    ///< all generations of the prompt that exist
  std::deque<Sequence*> pending;           ///< in the order of admission
  BlockTables blocks;                      ///< the prompt's cache, held while generations wait for it
  std::int64_t cached = 0;                 ///< number of prompt positions in `blocks`
  std::int64_t state = StateSlots::kNone;  ///< slot of the prompt's recurrent states, held as long as `blocks`

  std::int64_t length() const { return static_cast<std::int64_t>(tokens.size()); }
  bool ready() const { return cached == length(); }
  /// Whether the prompt's last logits are still needed, because a generation has no token yet.
  bool awaits_first_token() const;
};

}  // namespace nemo_rl::generation
