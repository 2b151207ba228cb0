// Stop strings. They are matched on the bytes of the generated tokens, so a string may begin in one token and end in
// another.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace nemo_rl::generation {

/// The bytes of every token id. Special tokens and ids beyond the table have none.
using TokenBytes = std::vector<std::string>;

class StopStrings {
 public:
  /// Throws ValueError for an empty string, which every text contains.
  explicit StopStrings(std::vector<std::string> strings);

  /// Appends a token's bytes to `tail`, the end of the text, and returns whether a stop string ends within these bytes.
  /// `tail` is empty before the first generated token, and keeps only the bytes that a later match may need.
  bool append(std::string& tail, std::string_view bytes) const;

 private:
  std::vector<std::string> strings_;
  std::size_t longest_ = 0;
};

}  // namespace nemo_rl::generation
