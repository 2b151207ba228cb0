// Stop strings, matched on the bytes of the generated tokens: a string may begin in one token and end in another.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nemo_rl::generation {

/// Bytes of every token id; ids beyond the table, and special tokens, have none.
using TokenBytes = std::vector<std::string>;

class StopStrings {
 public:
  /// Throws ValueError on an empty string, which every text would contain.
  explicit StopStrings(std::vector<std::string> strings);

  /// Appends a token's bytes to the text of which `tail` is the end, and says whether a stop string ends within them.
  /// `tail` starts empty at the first generated token, and keeps only what a later match may need.
  bool append(std::string& tail, std::string_view bytes) const;

 private:
  std::vector<std::string> strings_;
  std::size_t longest_ = 0;
};

}  // namespace nemo_rl::generation
