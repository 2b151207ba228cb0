// Hydra's override grammar: a lexer with the longest match, then a small recursive parser.
#include <algorithm>
#include <cctype>
#include <optional>

#include "common/check.h"
#include "config/limits.h"
#include "config/override.h"
#include "config/scalar.h"

namespace nemo_rl::config {
namespace {

enum class Token {
  open_paren,
  comma,
  close_paren,
  open_bracket,
  close_bracket,
  open_brace,
  close_brace,
  colon,
  equal,
  number,
  word,
  punctuation,
  identifier,
  escape,
  space,
  quoted,
  interpolation,
  end
};

struct Lexeme {
  Token token;
  std::string text;
};

bool is_space(char c) { return c == ' ' || c == '\t'; }
bool is_alpha(char c) {
  return std::isalpha(static_cast<unsigned char>(c)) != 0 && static_cast<unsigned char>(c) < 128;
}
bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// Splits a value into tokens. Structural characters take the blanks around them, as Hydra's lexer does.
class Lexer {
 public:
  explicit Lexer(const std::string& text) : text_(text) {}

  std::vector<Lexeme> run() {
    std::vector<Lexeme> lexemes;
    while (p_ < text_.size()) lexemes.push_back(next());
    lexemes.push_back({Token::end, ""});
    return lexemes;
  }

 private:
  char at(std::size_t i) const { return i < text_.size() ? text_[i] : '\0'; }

  std::size_t skip_space(std::size_t i) const {
    while (is_space(at(i))) ++i;
    return i;
  }

  Lexeme take(Token token, std::size_t end) {
    Lexeme lexeme{token, text_.substr(p_, end - p_)};
    p_ = end;
    return lexeme;
  }

  Lexeme next() {
    const std::size_t first = skip_space(p_);
    switch (at(first)) {
      case '(':
        return take(Token::open_paren, skip_space(first + 1));
      case ',':
        return take(Token::comma, skip_space(first + 1));
      case ':':
        return take(Token::colon, skip_space(first + 1));
      case '=':
        return take(Token::equal, skip_space(first + 1));
      case ')':
        return take(Token::close_paren, first + 1);
      case ']':
        return take(Token::close_bracket, first + 1);
      case '}':
        return take(Token::close_brace, first + 1);
      default:
        break;
    }
    if (first > p_) return take(Token::space, first);
    const char c = at(p_);
    if (c == '[') return take(Token::open_bracket, skip_space(p_ + 1));
    if (c == '{') return take(Token::open_brace, skip_space(p_ + 1));
    if (c == '\'' || c == '"') return quoted(c);
    if (c == '$' && at(p_ + 1) == '{') return interpolation();
    return plain();
  }

  Lexeme quoted(char quote) {
    for (std::size_t i = p_ + 1; i < text_.size(); ++i) {
      if (text_[i] != quote) continue;
      std::size_t slashes = 0;
      while (i - slashes - 1 > p_ && text_[i - slashes - 1] == '\\') ++slashes;
      if (slashes % 2 == 0) return take(Token::quoted, i + 1);
    }
    NRL_CHECK_ARG(false, "the quote ", quote, " is not closed");
    return {};
  }

  Lexeme interpolation() {
    const std::size_t close = text_.find('}', p_);
    NRL_CHECK_ARG(close != std::string::npos && close > p_ + 2, "'${' is not closed by '}'");
    return take(Token::interpolation, close + 1);
  }

  Lexeme plain() {
    const char c = at(p_);
    bool is_real = false;
    const std::size_t number = match_number(text_, p_, &is_real);
    std::size_t identifier = p_;
    if (is_alpha(c) || c == '_')
      while (is_alpha(at(identifier)) || is_digit(at(identifier)) || at(identifier) == '_' || at(identifier) == '-')
        ++identifier;
    const std::size_t length = identifier - p_;
    if (number > 0 && number >= length) return take(Token::number, p_ + number);
    if (length > 0) return take(literal(text_.substr(p_, length)) ? Token::word : Token::identifier, identifier);
    std::size_t escapes = p_;
    while (at(escapes) == '\\' && at(escapes + 1) != '\0' &&
           std::string("\\()[]{}:=, \t").find(at(escapes + 1)) != std::string::npos)
      escapes += 2;
    if (escapes > p_) return take(Token::escape, escapes);
    NRL_CHECK_ARG(std::string("/-\\+.$%*@?|").find(c) != std::string::npos && c != '\0', "the character '",
                  static_cast<unsigned char>(c) < 128 ? std::string(1, c) : shortened(text_.substr(p_), 4),
                  "' needs quotes: write the value as '...' (quoted for the shell too)");
    return take(Token::punctuation, p_ + 1);
  }

  const std::string& text_;
  std::size_t p_ = 0;
};

std::string unescape(const Lexeme& lexeme) {
  if (lexeme.token != Token::escape) return lexeme.text;
  std::string text;
  for (std::size_t i = 1; i < lexeme.text.size(); i += 2) text += lexeme.text[i];
  return text;
}

/// Backslashes count only before a quote: \" is ", \\" is \ and the end.
std::string unquote(const std::string& text) {
  const char quote = text[0];
  std::string out;
  for (std::size_t i = 1; i < text.size();) {
    std::size_t slashes = 0;
    while (text[i + slashes] == '\\') ++slashes;
    const bool at_quote = text[i + slashes] == quote;
    out.append(at_quote ? slashes / 2 : slashes, '\\');
    i += slashes;
    if (i + 1 >= text.size()) break;  // the closing quote
    out += text[i++];
  }
  return out;
}

class Parser {
 public:
  explicit Parser(std::vector<Lexeme> lexemes) : lexemes_(std::move(lexemes)) {}

  Node value() {
    Node node = element();
    NRL_CHECK_ARG(
        peek() != Token::comma,
        "a choice of several values (a sweep) is not possible here; a list is written [1,2], a comma in a text \\,");
    NRL_CHECK_ARG(peek() == Token::end, "'", current().text,
                  "' is not expected here; quote the value if it belongs to it");
    return node;
  }

 private:
  const Lexeme& current() const { return lexemes_[p_]; }
  Token peek(std::size_t ahead = 0) const { return lexemes_[std::min(p_ + ahead, lexemes_.size() - 1)].token; }

  void expect(Token token, const char* what) {
    NRL_CHECK_ARG(peek() == token, what, " is missing",
                  peek() == Token::end ? std::string() : " before '" + current().text + "'");
    ++p_;
  }

  Node element() {
    const Depth guard(depth_, "lists, mappings and casts are nested");
    if (peek() == Token::open_bracket) return list();
    if (peek() == Token::open_brace) return mapping();
    if (peek() == Token::identifier && peek(1) == Token::open_paren) return cast();
    if (peek() == Token::quoted) return Node::make_string(unquote(lexemes_[p_++].text));
    return primitive(true);
  }

  Node list() {
    ++p_;
    Node node = Node::make_list();
    while (peek() != Token::close_bracket) {
      if (!node.items.empty()) expect(Token::comma, "a comma or ']'");
      node.items.push_back(element());
    }
    ++p_;
    return node;
  }

  Node mapping() {
    ++p_;
    Node node = Node::make_mapping();
    while (peek() != Token::close_brace) {
      if (!node.entries.empty()) expect(Token::comma, "a comma or '}'");
      const Node key = primitive(false);
      expect(Token::colon, "':' after a key of {key: value}");
      node.set(key.is_string() ? key.string : python_text(key), element());
    }
    ++p_;
    return node;
  }

  static bool in_primitive(Token token, bool with_colon) {
    switch (token) {
      case Token::identifier:
      case Token::word:
      case Token::number:
      case Token::punctuation:
      case Token::escape:
      case Token::space:
        return true;
      case Token::colon:
      case Token::interpolation:
        return with_colon;
      default:
        return false;
    }
  }

  Node primitive(bool with_colon) {
    std::vector<Lexeme> parts;
    while (in_primitive(peek(), with_colon)) parts.push_back(lexemes_[p_++]);
    if (!parts.empty() && parts.front().token == Token::space) parts.erase(parts.begin());
    if (!parts.empty() && parts.back().token == Token::space) parts.pop_back();
    NRL_CHECK_ARG(!parts.empty(), peek() == Token::end ? std::string("a value is missing")
                                                       : "a value is missing before '" + current().text + "'");
    if (parts.size() == 1) {
      if (parts[0].token == Token::number || parts[0].token == Token::word) return *literal(parts[0].text);
      return Node::make_string(unescape(parts[0]));
    }
    std::string text;
    for (const Lexeme& part : parts) text += unescape(part);
    return Node::make_string(text);
  }

  Node cast() {
    const std::string name = lexemes_[p_++].text;
    const bool known = name == "int" || name == "float" || name == "str" || name == "bool";
    NRL_CHECK_ARG(known, "the function ", name,
                  "() is not possible here (known: int, float, str, bool); quote the value if it is text");
    ++p_;
    const Node argument = element();
    NRL_CHECK_ARG(peek() != Token::comma, name, "() takes one value");
    expect(Token::close_paren, "')'");
    return apply_cast(name, argument);
  }

  static Node apply_cast(const std::string& name, const Node& value) {
    Node out = value;
    if (value.is_list()) {
      for (Node& item : out.items) item = apply_cast(name, item);
      return out;
    }
    if (value.is_mapping()) {
      for (auto& [key, item] : out.entries) item = apply_cast(name, item);
      return out;
    }
    NRL_CHECK_ARG(!value.is_null(), name, "(null) is not possible");
    if (name == "str")
      return Node::make_string(value.kind == Kind::boolean ? (value.boolean ? "true" : "false") : python_text(value));
    Node number = value;
    if (value.is_string()) {
      std::string text = value.string;
      text.erase(0, text.find_first_not_of(" \t"));
      text.erase(text.find_last_not_of(" \t") + 1);
      const auto parsed = literal(text);
      const bool fits = parsed && !parsed->is_null() && (name == "bool") == (parsed->kind == Kind::boolean) &&
                        (name != "int" || parsed->kind == Kind::integer);
      NRL_CHECK_ARG(fits, name, "(", value.string, ") is not possible");
      number = *parsed;
    }
    if (name == "bool") return Node::make_bool(number.number() != 0);
    if (name == "float") return Node::make_real(number.number());
    if (number.kind == Kind::integer) return number;
    const double whole = number.number();
    NRL_CHECK_ARG(whole > -9.2e18 && whole < 9.2e18, "int(", python_text(number), ") is not possible");
    return Node::make_int(static_cast<std::int64_t>(whole));
  }

  std::vector<Lexeme> lexemes_;
  std::size_t p_ = 0;
  int depth_ = 0;
};

void check_key(const std::string& key) {
  NRL_CHECK_ARG(!key.empty(), "the key is missing: write key=value");
  NRL_CHECK_ARG(key.find('@') == std::string::npos && key.find('/') == std::string::npos, "'", key,
                "' looks like a Hydra config group; there are none here: write section.key=value");
  const auto parts = split_key(key);
  NRL_CHECK_ARG(parts.size() <= kDeepest, "a key has at most ", kDeepest, " parts, this one ", parts.size());
  for (const auto& part : parts) {
    const bool number = !part.empty() && std::all_of(part.begin(), part.end(), is_digit);
    const bool word = !part.empty() && (is_alpha(part[0]) || part[0] == '_' || part[0] == '$') &&
                      std::all_of(part.begin(), part.end(), [](char c) {
                        return is_alpha(c) || is_digit(c) || c == '_' || c == '-' || c == '$';
                      });
    NRL_CHECK_ARG(word || (number && part.size() < key.size()), "'", key,
                  "' is not a key: write words joined by dots (a.b.c), with the element's number for a list (a.0)");
  }
}

}  // namespace

Override parse_override(const std::string& text) {
  Override parsed;
  parsed.text = text;
  std::string rest = text;
  if (rest.rfind("++", 0) == 0) {
    parsed.type = OverrideType::force_add;
    rest.erase(0, 2);
  } else if (rest.rfind("+", 0) == 0) {
    parsed.type = OverrideType::add;
    rest.erase(0, 1);
  } else if (rest.rfind("~", 0) == 0) {
    parsed.type = OverrideType::erase;
    rest.erase(0, 1);
  }
  const std::size_t equal = rest.find('=');
  parsed.key = rest.substr(0, equal);
  if (equal == std::string::npos) {
    NRL_CHECK_ARG(parsed.type == OverrideType::erase, "'=' is missing: write key=value");
    check_key(parsed.key);
    return parsed;
  }
  NRL_CHECK_ARG(parsed.key.rfind("--", 0) != 0, "write it without the dashes: ", rest.substr(2));
  check_key(parsed.key);
  std::string value = rest.substr(equal + 1);
  value.erase(0, std::min(value.find_first_not_of(" \t"), value.size()));
  parsed.has_value = true;
  try {
    parsed.value = value.empty() ? Node::make_string("") : Parser(Lexer(value).run()).value();
    NRL_CHECK_ARG(count_values(parsed.value) <= kMostValues, "holds more than ", kMostValues, " values");
  } catch (const std::out_of_range& error) {
    throw ArgumentError(error.what());
  }
  return parsed;
}

}  // namespace nemo_rl::config
