#include "generation/sequence.h"

#include <algorithm>

namespace nemo_rl::generation {

const char* finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::stop_token:
      return "stop_token";
    case FinishReason::stop_string:
      return "stop_string";
    case FinishReason::length:
      return "length";
    default:
      return "none";
  }
}

std::int64_t Sequence::prompt_length() const { return group->length(); }

std::int64_t Sequence::token(std::int64_t position) const {
  const std::int64_t P = prompt_length();
  return position < P ? group->tokens[position] : generated[position - P];
}

RandomKey Sequence::random_key(std::int64_t ahead) const {
  RandomKey k = key;
  k.position = static_cast<std::uint32_t>(length() + ahead);
  return k;
}

void Sequence::append(const kernels::SampledToken& sampled, const TokenBytes& token_bytes) {
  generated.push_back(sampled.token);
  logprobs.push_back(sampled.logprob);
  entropies.push_back(sampled.entropy);
  const auto& stops = params.stop_token_ids;
  const bool has_bytes = sampled.token < static_cast<std::int64_t>(token_bytes.size());
  if (std::find(stops.begin(), stops.end(), sampled.token) != stops.end()) {
    finish_reason = FinishReason::stop_token;
  } else if (params.stop_strings && has_bytes && params.stop_strings->append(text_tail, token_bytes[sampled.token])) {
    finish_reason = FinishReason::stop_string;
  } else if (length() >= max_length) {
    finish_reason = FinishReason::length;
  }
}

bool PromptGroup::awaits_first_token() const {
  return std::any_of(pending.begin(), pending.end(), [](const Sequence* s) { return s->generated.empty(); });
}

}  // namespace nemo_rl::generation
