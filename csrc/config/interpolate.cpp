#include "config/interpolate.h"

#include <set>

#include "common/check.h"
#include "config/limits.h"
#include "config/resolvers.h"
#include "config/scalar.h"

namespace nemo_rl::config {
namespace {

const std::string kMandatory(3, '?');  // OmegaConf's mark of a value that must be given; a literal would be a trigraph

std::string trim(const std::string& text) {
  const std::size_t begin = text.find_first_not_of(" \t\n");
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
}

class Resolver {
 public:
  Resolver(Node& root, const std::vector<Alias>& aliases, std::vector<Problem>& problems)
      : root_(root), aliases_(aliases), problems_(problems) {}

  void run() { resolve_node(root_, ""); }

 private:
  /// Resolves a node in place, with everything below it.
  void resolve_node(Node& node, const std::string& key) {
    if (node.is_string() && node.string.find("${") != std::string::npos) {
      if (!failed_.contains(key) && !done_.contains(key)) resolve_string(node, key);
      return;
    }
    for (std::size_t i = 0; i < node.items.size(); ++i) resolve_node(node.items[i], child_key(key, std::to_string(i)));
    for (auto& [name, value] : node.entries) resolve_node(value, child_key(key, name));
  }

  static std::string child_key(const std::string& key, const std::string& name) {
    return key.empty() ? name : key + "." + name;
  }

  void resolve_string(Node& node, const std::string& key) {
    const Source source = node.source;
    if (!open_.insert(key).second) throw ArgumentError("refers to itself");
    Node value;
    try {
      value = text_value(node.string, key);
      open_.erase(key);
    } catch (const std::logic_error& error) {  // a mistake, or an integer out of range
      open_.erase(key);
      if (failed_.insert(key).second)
        problems_.push_back({"interpolation", key, source.text(), shortened(node.string) + ": " + error.what()});
      value = Node::make_null();
    }
    value.source = source;
    node = std::move(value);
    done_.insert(key);
  }

  /// A text with interpolations: one that is nothing but an interpolation keeps the value's type.
  Node text_value(const std::string& text, const std::string& key) {
    const Depth guard(depth_, "interpolations stand in each other, or refer to each other,");
    if (text.rfind("${", 0) == 0 && closing(text, 0) + 1 == text.size())
      return interpolation(text.substr(2, text.size() - 3), key);
    std::string out;
    for (std::size_t p = 0; p < text.size();) {
      const std::size_t dollar = text.find("${", p);
      if (dollar == std::string::npos) {
        out += text.substr(p);
        break;
      }
      std::size_t slashes = 0;
      while (dollar > p + slashes && text[dollar - slashes - 1] == '\\') ++slashes;
      out += text.substr(p, dollar - p - slashes) + std::string(slashes / 2, '\\');
      if (slashes % 2 == 1) {
        out += "${";
        p = dollar + 2;
        continue;
      }
      const std::size_t close = closing(text, dollar);
      const Node value = interpolation(text.substr(dollar + 2, close - dollar - 2), key);
      NRL_CHECK_ARG(!value.is_mapping() && !value.is_list(), "is ", kind_name(value.kind),
                    " and cannot stand inside a text");
      out += python_text(value);
      NRL_CHECK_ARG(out.size() <= kMostTextBytes, "makes a text of more than ", kMostTextBytes, " bytes");
      p = close + 1;
    }
    made_bytes_ += out.size();
    NRL_CHECK_ARG(made_bytes_ <= kMostTextBytes, "the texts made by interpolations have more than ", kMostTextBytes,
                  " bytes together");
    return Node::make_string(out);
  }

  /// Index of the brace that closes the `${` at `open`; quoted braces do not count.
  static std::size_t closing(const std::string& text, std::size_t open) {
    int depth = 0;
    char quote = '\0';
    for (std::size_t i = open; i < text.size(); ++i) {
      const char c = text[i];
      if (quote != '\0') {
        if (c == '\\') ++i;
        else if (c == quote) quote = '\0';
      } else if (depth > 0 && (c == '\'' || c == '"')) {
        quote = c;
      } else if (c == '{') {
        ++depth;
      } else if (c == '}' && --depth == 0) {
        return i;
      }
    }
    throw ArgumentError("'${' is not closed by '}'");
  }

  /// What stands between `${` and `}`.
  Node interpolation(const std::string& body, const std::string& key) {
    const std::size_t colon = top_level_colon(body);
    if (colon == std::string::npos) return reference(body, key);
    const std::string name = trim(plain_text(body.substr(0, colon), key));
    std::vector<Node> arguments;
    const std::string rest = body.substr(colon + 1);
    if (!trim(rest).empty())
      for (const std::string& argument : split_top_level(rest))
        arguments.push_back(argument_value(trim(argument), key));
    return call_resolver(name, arguments);
  }

  static std::size_t top_level_colon(const std::string& body) {
    int depth = 0;
    for (std::size_t i = 0; i < body.size(); ++i) {
      if (body[i] == '{') ++depth;
      if (body[i] == '}') --depth;
      if (body[i] == ':' && depth == 0) return i;
    }
    return std::string::npos;
  }

  static std::vector<std::string> split_top_level(const std::string& text) {
    std::vector<std::string> parts(1);
    int depth = 0;
    char quote = '\0';
    for (const char c : text) {
      if (quote != '\0') {
        if (c == quote) quote = '\0';
      } else if (c == '\'' || c == '"') {
        quote = c;
      } else if (c == '{' || c == '[') {
        ++depth;
      } else if (c == '}' || c == ']') {
        --depth;
      } else if (c == ',' && depth == 0) {
        parts.emplace_back();
        continue;
      }
      parts.back() += c;
    }
    return parts;
  }

  Node argument_value(const std::string& text, const std::string& key) {
    if (text.size() >= 2 && (text[0] == '\'' || text[0] == '"') && text.back() == text[0]) {
      const std::string inner = text.substr(1, text.size() - 2);
      return inner.find("${") == std::string::npos ? Node::make_string(inner)
                                                   : Node::make_string(plain_text(inner, key));
    }
    if (text.find("${") != std::string::npos) return text_value(text, key);
    if (const auto value = literal(text)) return *value;
    return Node::make_string(text);
  }

  std::string plain_text(const std::string& text, const std::string& key) {
    return text.find("${") == std::string::npos ? text : python_text(text_value(text, key));
  }

  /// ${a.b[0]}, ${.x}, ${..x}: the node, resolved and copied.
  Node reference(const std::string& body, const std::string& key) {
    std::string path = trim(plain_text(body, key));
    NRL_CHECK_ARG(!path.empty(), "an interpolation needs a key");
    std::size_t dots = 0;
    while (dots < path.size() && path[dots] == '.') ++dots;
    path = with_dots(path.substr(dots));
    if (dots > 0) {
      const auto parts = split_key(key);
      NRL_CHECK_ARG(dots <= parts.size(), "goes above the top of the file");
      const std::string base = join_key(parts, parts.size() - dots);
      path = base.empty() ? path : path.empty() ? base : base + "." + path;
    }
    for (const Alias& alias : aliases_)
      if (alias.spelling == path) path = alias.canonical;
    NRL_CHECK_ARG(path != key && key.rfind(path + ".", 0) != 0, "refers to itself");
    Node* found = look_up(path);
    NRL_CHECK_ARG(found != nullptr, "there is no key ", path);
    NRL_CHECK_ARG(!open_.contains(path), "refers to itself through ", path);
    NRL_CHECK_ARG(!(found->is_string() && found->string == kMandatory), path, " is '", kMandatory,
                  "' (it must be given) and was not set");
    resolve_node(*found, path);
    NRL_CHECK_ARG(!failed_.contains(path), "depends on ", path, ", which failed");
    copied_values_ += count_values(*found);
    NRL_CHECK_ARG(copied_values_ <= kMostValues, "interpolations copy more than ", kMostValues, " values together");
    if (found->is_string()) made_bytes_ += found->string.size();
    NRL_CHECK_ARG(made_bytes_ <= kMostTextBytes, "the texts made by interpolations have more than ", kMostTextBytes,
                  " bytes together");
    return *found;
  }

  /// As find_path, but a part of the way may itself be an interpolation.
  Node* look_up(const std::string& path) {
    Node* node = &root_;
    const auto parts = split_key(path);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (i > 0 && node->is_string()) {
        const std::string here = join_key(parts, i);
        if (open_.contains(here)) return nullptr;
        resolve_node(*node, here);
      }
      if ((node = node->find(parts[i])) == nullptr) return nullptr;
    }
    return node;
  }

  static std::string with_dots(const std::string& path) {  // a[0][b] -> a.0.b
    std::string out;
    for (const char c : path) {
      if (c == '[') {
        if (!out.empty()) out += '.';
      } else if (c != ']') {
        out += c;
      }
    }
    return out;
  }

  Node& root_;
  const std::vector<Alias>& aliases_;
  std::vector<Problem>& problems_;
  int depth_ = 0;
  std::size_t copied_values_ = 0;
  std::size_t made_bytes_ = 0;
  std::set<std::string> open_;  // being resolved now
  std::set<std::string> failed_;
  std::set<std::string> done_;  // a resolved text may hold a literal "${"
};

}  // namespace

void resolve_interpolations(Node& tree, const std::vector<Alias>& aliases, std::vector<Problem>& problems) {
  Resolver(tree, aliases, problems).run();
}

}  // namespace nemo_rl::config
