#include "generation/stop_strings.h"

#include <algorithm>

#include "common/check.h"

namespace nemo_rl::generation {

StopStrings::StopStrings(std::vector<std::string> strings) : strings_(std::move(strings)) {
  for (const auto& s : strings_) {
    NRL_CHECK_ARG(!s.empty(),
                  "stop_strings holds an empty string, which would stop every text at its first token: remove it");
    longest_ = std::max(longest_, s.size());
  }
}

bool StopStrings::append(std::string& tail, std::string_view bytes) const {
  if (strings_.empty() || bytes.empty()) return false;
  const std::size_t seen = tail.size();
  tail.append(bytes);
  for (const auto& s : strings_) {
    // a match must end behind `seen`, so it begins at seen - (size - 1) or later
    const std::size_t first = seen + 1 > s.size() ? seen + 1 - s.size() : 0;
    if (tail.find(s, first) != std::string::npos) return true;
  }
  if (tail.size() >= longest_) tail.erase(0, tail.size() - (longest_ - 1));
  return false;
}

}  // namespace nemo_rl::generation
