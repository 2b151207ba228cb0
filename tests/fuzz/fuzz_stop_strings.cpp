// Stop strings against the plain search of the whole text: lines of the first part are strings, lines of the second
// tokens.
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "generation/stop_strings.h"

namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

/// Whether a string ends after byte `from` of the text.
bool ends_after(const std::string& text, std::size_t from, const std::vector<std::string>& strings) {
  for (const std::string& string : strings)
    for (std::size_t at = text.find(string); at != std::string::npos; at = text.find(string, at + 1))
      if (at + string.size() > from) return true;
  return false;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), std::min<std::size_t>(size, 4096));
  const std::size_t middle = std::min(input.find('\0'), input.size());
  const std::vector<std::string> strings = lines_of(input.substr(0, middle));
  const std::vector<std::string> tokens = lines_of(middle < input.size() ? input.substr(middle + 1) : "");
  try {
    const nemo_rl::generation::StopStrings stops(strings);
    std::string tail, text;
    for (const std::string& token : tokens) {
      const std::size_t from = text.size();
      text += token;
      if (stops.append(tail, token) != ends_after(text, from, strings)) std::abort();
    }
  } catch (const std::invalid_argument&) {
    bool has_empty = false;
    for (const std::string& string : strings) has_empty |= string.empty();
    if (!has_empty) std::abort();
  }
  return 0;
}
