#include "config/limits.h"

namespace nemo_rl::config {
namespace {

/// Bytes of the character that begins at `i`; 0 if none does: too short, overlong, a surrogate, or beyond U+10FFFF.
std::size_t character_bytes(const std::string& text, std::size_t i) {
  const auto byte = [&](std::size_t k) { return k < text.size() ? static_cast<unsigned char>(text[k]) : 0; };
  const unsigned first = byte(i);
  if (first < 0x80) return 1;
  const std::size_t size = first >= 0xC2 && first < 0xE0   ? 2
                           : first >= 0xE0 && first < 0xF0 ? 3
                           : first >= 0xF0 && first < 0xF5 ? 4
                                                           : 0;
  for (std::size_t k = 1; k < size; ++k)
    if ((byte(i + k) & 0xC0) != 0x80) return 0;
  const unsigned second = byte(i + 1);
  const bool excluded = (first == 0xE0 && second < 0xA0) || (first == 0xED && second >= 0xA0) ||
                        (first == 0xF0 && second < 0x90) || (first == 0xF4 && second >= 0x90);
  return excluded ? 0 : size;
}

}  // namespace

Extent extent_of(const Node& node) {
  Extent extent{1, node.string.size()};
  const auto add = [&](const Node& inner) {
    const Extent more = extent_of(inner);
    extent.values += more.values, extent.bytes += more.bytes;
  };
  for (const Node& item : node.items) add(item);
  for (const auto& [key, value] : node.entries) extent.bytes += key.size(), add(value);
  return extent;
}

std::size_t count_values(const Node& node) { return extent_of(node).values; }

std::size_t first_not_utf8(const std::string& text) {
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t size = character_bytes(text, i);
    if (size == 0) return i;
    i += size;
  }
  return std::string::npos;
}

std::string shortened(const std::string& text, std::size_t bytes) {
  if (text.size() <= bytes) return text;
  std::size_t end = 0;
  for (std::size_t size = character_bytes(text, 0); size > 0 && end + size <= bytes; size = character_bytes(text, end))
    end += size;
  return text.substr(0, end) + "...";
}

}  // namespace nemo_rl::config
