#include "config/scalar.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <regex>
#include <string_view>

namespace nemo_rl::config {
namespace {

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

std::string without_underscores(std::string text) {
  std::erase(text, '_');
  return text;
}

double to_double(const std::string& text) {
  const char* begin = text.c_str() + (text[0] == '+' ? 1 : 0);
  double value = 0;
  const auto result = std::from_chars(begin, text.c_str() + text.size(), value);
  if (result.ec == std::errc::result_out_of_range) return std::strtod(begin, nullptr);  // 0 or infinity, as Python
  return value;
}

std::int64_t to_int(const std::string& digits, int base, bool negative) {
  std::int64_t value = 0;
  const std::string text = (negative ? "-" : "") + digits;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (result.ec == std::errc::result_out_of_range)
    throw std::out_of_range("the integer " + text + " does not fit 64 bits");
  return value;
}

/// 12:30:45 is 12 * 3600 + 30 * 60 + 45.
std::int64_t whole_sexagesimal(const std::string& text, bool negative) {
  std::int64_t value = 0;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(':', begin), text.size());
    const std::int64_t part = to_int(text.substr(begin, end - begin), 10, negative);
    if (__builtin_mul_overflow(value, 60, &value) || __builtin_add_overflow(value, part, &value))
      throw std::out_of_range("the integer " + std::string(negative ? "-" : "") + text +
                              " (in base 60, since it has colons) does not fit 64 bits");
    begin = end + 1;
  }
  return value;
}

double sexagesimal(const std::string& text) {
  double value = 0;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find(':', begin), text.size());
    value = value * 60 + to_double(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return value;
}

Node yaml_float(std::string text) {
  text = lower(without_underscores(std::move(text)));
  const bool negative = text[0] == '-';
  if (text[0] == '-' || text[0] == '+') text.erase(0, 1);
  double value;
  if (text == ".inf") value = std::numeric_limits<double>::infinity();
  else if (text == ".nan") value = std::numeric_limits<double>::quiet_NaN();
  else value = text.find(':') != std::string::npos ? sexagesimal(text) : to_double(text);
  return Node::make_real(negative ? -value : value);
}

Node yaml_int(std::string text) {
  text = without_underscores(std::move(text));
  const bool negative = text[0] == '-';
  if (text[0] == '-' || text[0] == '+') text.erase(0, 1);
  if (text.find(':') != std::string::npos) return Node::make_int(whole_sexagesimal(text, negative));
  if (text.rfind("0b", 0) == 0) return Node::make_int(to_int(text.substr(2), 2, negative));
  if (text.rfind("0x", 0) == 0) return Node::make_int(to_int(text.substr(2), 16, negative));
  if (text.size() > 1 && text[0] == '0') return Node::make_int(to_int(text.substr(1), 8, negative));
  return Node::make_int(to_int(text, 10, negative));
}

/// Of a text that is too long for a regular expression: a plain number, or no number and no word.
Node long_scalar(const std::string& text) {
  std::string_view digits = text;
  if (digits[0] == '+' || digits[0] == '-') digits.remove_prefix(1);
  const auto only = [&](const char* of) { return digits.find_first_not_of(of) == std::string_view::npos; };
  const bool binary = digits.starts_with("0b"), hexadecimal = digits.starts_with("0x");
  if (binary || hexadecimal) {
    digits.remove_prefix(2);
    return only(binary ? "01_" : "0123456789abcdefABCDEF_") ? yaml_int(text) : Node::make_string(text);
  }
  if (!std::isdigit(static_cast<unsigned char>(digits[0]))) return Node::make_string(text);
  if (digits[0] != '0' && only("0123456789_")) return yaml_int(text);
  const bool has_one_point = std::count(digits.begin(), digits.end(), '.') == 1;
  return has_one_point && only("0123456789_.") ? yaml_float(text) : Node::make_string(text);
}

}  // namespace

Node yaml_scalar(const std::string& text) {
  static const std::regex boolean("yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF");
  static const std::regex null("~|null|Null|NULL|");
  static const std::regex real(
      R"([-+]?[0-9]+(_[0-9]+)*\.[0-9_]*([eE][-+]?[0-9]+)?|[-+]?[0-9]+(_[0-9]+)*[eE][-+]?[0-9]+)"
      R"(|\.[0-9]+(_[0-9]+)*([eE][-+][0-9]+)?|[-+]?[0-9]+(_[0-9]+)*(:[0-5]?[0-9])+\.[0-9_]*)"
      R"(|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))");
  static const std::regex integer(
      R"([-+]?0b[0-1_]+|[-+]?0[0-7_]+|[-+]?(0|[1-9][0-9_]*)|[-+]?0x[0-9a-fA-F_]+|[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+)");
  if (text.size() > 64) return long_scalar(text);
  const bool numeric = !text.empty() && (std::isdigit(static_cast<unsigned char>(text[0])) || text[0] == '-' ||
                                         text[0] == '+' || text[0] == '.');
  if (numeric) {
    if (std::regex_match(text, real)) return yaml_float(text);
    if (std::regex_match(text, integer)) return yaml_int(text);
  } else if (std::regex_match(text, null)) {
    return Node::make_null();
  } else if (std::regex_match(text, boolean)) {
    const std::string word = lower(text);
    return Node::make_bool(word == "yes" || word == "true" || word == "on");
  }
  return Node::make_string(text);
}

std::size_t match_number(const std::string& text, std::size_t begin, bool* is_real) {
  const auto digit = [&](std::size_t i) {
    return i < text.size() && std::isdigit(static_cast<unsigned char>(text[i]));
  };
  const auto digits = [&](std::size_t i) {  // digits with single underscores between them
    while (digit(i)) {
      ++i;
      if (i < text.size() && text[i] == '_' && digit(i + 1)) ++i;
    }
    return i;
  };
  std::size_t p = begin;
  if (p < text.size() && (text[p] == '+' || text[p] == '-')) ++p;
  *is_real = false;
  const std::string word = lower(text.substr(std::min(p, text.size()), 3));
  if (word == "inf" || word == "nan") {
    *is_real = true;
    return p + 3 - begin;
  }
  std::size_t end = p;
  if (digit(p)) end = text[p] == '0' ? p + 1 : digits(p);  // a leading zero stands alone
  std::size_t after = end;
  if (end < text.size() && text[end] == '.' && (end > p || digit(end + 1))) {
    after = digits(end + 1);
    *is_real = true;
  }
  if (after > p && after < text.size() && (text[after] == 'e' || text[after] == 'E')) {
    std::size_t exponent = after + 1;
    if (exponent < text.size() && (text[exponent] == '+' || text[exponent] == '-')) ++exponent;
    if (digit(exponent)) {
      after = digits(exponent);
      *is_real = true;
    }
  }
  return after > p ? after - begin : 0;
}

std::optional<Node> literal(const std::string& text) {
  const std::string word = lower(text);
  if (word == "null") return Node::make_null();
  if (word == "true" || word == "false") return Node::make_bool(word == "true");
  bool is_real = false;
  if (text.empty() || match_number(text, 0, &is_real) != text.size()) return std::nullopt;
  const std::string digits = lower(without_underscores(text));
  if (!is_real) return yaml_int(digits);
  const bool negative = digits[0] == '-';
  const std::string magnitude = digits[0] == '-' || digits[0] == '+' ? digits.substr(1) : digits;
  const double value = magnitude == "inf"   ? std::numeric_limits<double>::infinity()
                       : magnitude == "nan" ? std::numeric_limits<double>::quiet_NaN()
                                            : to_double(magnitude);
  return Node::make_real(negative ? -value : value);
}

namespace {

/// Shortest digits that read back as the same double, laid out as Python's repr does.
std::string python_real(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[40];
  const auto result = std::to_chars(buffer, buffer + sizeof buffer, value, std::chars_format::scientific);
  const std::string text(buffer, result.ptr);
  const std::size_t e = text.find('e');
  const int exponent = std::stoi(text.substr(e + 1));
  std::string digits;
  for (const char c : text.substr(0, e))
    if (std::isdigit(static_cast<unsigned char>(c))) digits += c;
  const std::string sign = text[0] == '-' ? "-" : "";
  if (exponent < -4 || exponent >= 16) {
    const std::string power = (exponent < 0 ? "-" : "+") + std::string(std::abs(exponent) < 10 ? "0" : "") +
                              std::to_string(std::abs(exponent));
    return sign + digits[0] + (digits.size() > 1 ? "." + digits.substr(1) : "") + "e" + power;
  }
  if (exponent < 0) return sign + "0." + std::string(-exponent - 1, '0') + digits;
  const std::size_t whole = exponent + 1;
  if (digits.size() <= whole) return sign + digits + std::string(whole - digits.size(), '0') + ".0";
  return sign + digits.substr(0, whole) + "." + digits.substr(whole);
}

}  // namespace

std::string python_text(const Node& node) {
  switch (node.kind) {
    case Kind::null:
      return "None";
    case Kind::boolean:
      return node.boolean ? "True" : "False";
    case Kind::integer:
      return std::to_string(node.integer);
    case Kind::real:
      return python_real(node.real);
    case Kind::string:
      return node.string;
    default:
      return kind_name(node.kind);
  }
}

}  // namespace nemo_rl::config
