#include "generation/drafts.h"

#include <algorithm>

namespace nemo_rl::generation {
namespace {

struct Match {
  const Sequence* source = nullptr;
  std::int64_t end = 0;  ///< position after the repeated tokens
  std::int64_t length = 0;
};

/// Looks for the last tokens of `s` in positions [begin, end) of `source`, and replaces `best` by a longer match.
void look(const Sequence& s, const Sequence& source, std::int64_t begin, std::int64_t end, Match& best) {
  const std::int64_t last = s.length() - 1, token = s.token(last);
  for (std::int64_t p = end - 1; p >= begin && best.length < kLongestMatch; --p) {
    if (source.token(p) != token) continue;
    const std::int64_t limit = std::min({kLongestMatch, p - begin + 1, last + 1});
    std::int64_t length = 1;
    while (length < limit && source.token(p - length) == s.token(last - length)) ++length;
    if (length > best.length) best = {&source, p + 1, length};
  }
}

}  // namespace

std::vector<std::int64_t> draft_tokens(const Sequence& s, std::int64_t least_match, std::int64_t most) {
  Match best;
  look(s, s, 0, s.length() - 1, best);
  for (const Sequence* other : s.group->members)
    if (other != &s) look(s, *other, s.prompt_length(), other->length() - 1, best);
  std::vector<std::int64_t> drafts;
  if (best.length < least_match) return drafts;
  const std::int64_t end = std::min(best.source->length(), best.end + std::min(best.length, most));
  for (std::int64_t p = best.end; p < end; ++p) drafts.push_back(best.source->token(p));
  return drafts;
}

}  // namespace nemo_rl::generation
