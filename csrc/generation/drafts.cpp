#include "generation/drafts.h"

#include <algorithm>
#include <span>

namespace nemo_rl::generation {
namespace {

struct Match {
  const Sequence* source = nullptr;
  std::int64_t end = 0;  ///< position after the repeated tokens
  std::int64_t length = 0;
};

/// Looks for the last tokens of `s` in `tokens`, which are those of `source` from position `begin` on, and replaces
/// `best` by a longer match.
void look(const Sequence& s, const Sequence& source, std::int64_t begin, std::span<const std::int64_t> tokens,
          Match& best) {
  const std::int64_t last = s.length() - 1, token = s.token(last);
  for (std::size_t i = tokens.size(); i-- > 0 && best.length < kLongestMatch;) {
    if (tokens[i] != token) continue;
    const std::int64_t p = begin + static_cast<std::int64_t>(i), limit = std::min({kLongestMatch, p + 1, last + 1});
    std::int64_t length = 1;
    while (length < limit && source.token(p - length) == s.token(last - length)) ++length;
    if (length > best.length) best = {&source, p + 1, length};
  }
}

}  // namespace

std::vector<std::int64_t> draft_tokens(const Sequence& s, std::int64_t least_match, std::int64_t most) {
  Match best;
  const auto before_last = [](const std::vector<std::int64_t>& tokens) {
    return std::span(tokens).first(tokens.empty() ? 0 : tokens.size() - 1);
  };
  const std::int64_t P = s.prompt_length();
  look(s, s, P, before_last(s.generated), best);
  look(s, s, 0, s.group->tokens, best);
  for (const Sequence* other : s.group->members)
    if (other != &s) look(s, *other, P, before_last(other->generated), best);
  std::vector<std::int64_t> drafts;
  if (best.length < least_match) return drafts;
  const std::int64_t end = std::min(best.source->length(), best.end + std::min(best.length, most));
  for (std::int64_t p = best.end; p < end; ++p) drafts.push_back(best.source->token(p));
  return drafts;
}

}  // namespace nemo_rl::generation
