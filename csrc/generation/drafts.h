// Speculative decoding without a draft model: tokens that followed the same text before are computed in the same step
// as a sequence's last token. A token is drawn by the key of its sample and position, so a draft is taken only if it is
// the token that would have been drawn: drafts change the number of steps, never a token or its log-probability.
#pragma once
#include <cstdint>
#include <vector>

#include "generation/sequence.h"

namespace nemo_rl::generation {

/// The longest repeated text that draft_tokens() looks for, in tokens.
inline constexpr std::int64_t kLongestMatch = 8;

/// Returns tokens that may follow `s`, which has generated at least one: those that followed the longest repetition of
/// its last tokens, in the sequence itself or in another generation of its prompt; of equally long ones the latest in
/// the sequence. At most as many tokens as were repeated, and at most `most`; none if fewer than `least_match` tokens
/// were repeated.
std::vector<std::int64_t> draft_tokens(const Sequence& s, std::int64_t least_match, std::int64_t most);

}  // namespace nemo_rl::generation
