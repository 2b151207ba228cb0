#include "config/override.h"

#include <map>

#include "common/check.h"
#include "config/limits.h"
#include "config/scalar.h"

namespace nemo_rl::config {
namespace {

void set_source(Node& node, const Source& source) {
  node.source = source;
  for (Node& item : node.items) set_source(item, source);
  for (auto& [key, value] : node.entries) set_source(value, source);
}

/// The key is not in the files and has no default either.
struct UnknownKey : ArgumentError {
  UnknownKey(std::string key_, const std::string& message) : ArgumentError(message), key(std::move(key_)) {}
  std::string key;
};

class Applier {
 public:
  Applier(Node& tree, const OverrideRules& rules) : tree_(tree), rules_(rules) {}

  void apply(const Override& given) {
    const std::string key = canonical(given.key);
    const Node* old = find_path(tree_, key);
    if (given.type == OverrideType::erase) {
      erase(given, key, old);
      return;
    }
    Node value = given.value;
    set_source(value, {"override '" + shortened(given.text) + "'", 0});
    value = rename_inside(given, key, std::move(value));
    if (given.type == OverrideType::add) {
      const bool free = old == nullptr || old->is_null() || value.is_mapping() || value.is_list();
      NRL_CHECK_ARG(free, "is set already; write it without '+' to change it: ", given.text.substr(1));
    }
    check_spelling(given, key, value);
    Node changed = tree_;
    put(changed, key, value, given);
    tree_ = std::move(changed);
  }

 private:
  std::string canonical(const std::string& key) const {
    for (const Alias& alias : rules_.aliases)
      if (alias.spelling == key) return alias.canonical;
    return key;
  }

  /// A mapping given as value may hold an alias: `grpo={dapo_batch_multiplier: 3}`.
  Node rename_inside(const Override& given, const std::string& key, Node value) const {
    if (!value.is_mapping()) return value;
    std::vector<Alias> inside;
    for (const Alias& alias : rules_.aliases)
      if (alias.spelling.rfind(key + ".", 0) == 0 && alias.canonical.rfind(key + ".", 0) == 0)
        inside.push_back({alias.spelling.substr(key.size() + 1), alias.canonical.substr(key.size() + 1)});
    std::vector<Problem> problems;
    rename_aliases(value, inside, problems);
    NRL_CHECK_ARG(problems.empty(), "gives one setting under two names with different values: ", given.text);
    return value;
  }

  void check_spelling(const Override& given, const std::string& key, const Node& value) {
    const auto [before, first] = spellings_.try_emplace(key, given.key, value);
    NRL_CHECK_ARG(first || before->second.first == given.key || before->second.second.same_value(value),
                  "is another name of ", before->second.first,
                  ", which another override sets to a different value; keep one of them");
    if (!first) before->second = {given.key, value};
  }

  void erase(const Override& given, const std::string& key, const Node* old) {
    NRL_CHECK_ARG(old != nullptr && !old->is_null(), "cannot be deleted: it does not exist");
    NRL_CHECK_ARG(!given.has_value || given.value.is_null() || old->same_value(given.value) ||
                      python_text(*old) == python_text(given.value),
                  "is not deleted: its value is ", python_text(*old), ", not ", python_text(given.value));
    const auto parts = split_key(key);
    Node* parent = parts.size() == 1 ? &tree_ : find_path(tree_, join_key(parts, parts.size() - 1));
    parent->erase(parts.back());
  }

  bool may_create(const std::string& key, const Override& given) const {
    return given.type != OverrideType::change || rules_.known_keys.contains(key);
  }

  /// Of a key whose part `i` is missing, the shortest beginning that is not known either.
  std::string first_unknown(const std::vector<std::string>& parts, std::size_t i) const {
    std::string here = join_key(parts, ++i);
    while (i < parts.size() && rules_.known_keys.contains(here)) here = join_key(parts, ++i);
    return here;
  }

  void put(Node& root, const std::string& key, const Node& value, const Override& given) const {
    const auto parts = split_key(key);
    Node* node = &root;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::string here = join_key(parts, i + 1);
      Node* next = node->find(parts[i]);
      if (next == nullptr) {
        NRL_CHECK_ARG(!node->is_list(), "has no element ", parts[i], ": the list holds ", node->items.size());
        if (!may_create(key, given))
          throw UnknownKey(first_unknown(parts, i), "does not exist; to add a key write +" + given.text);
        next = &node->set(parts[i], i + 1 < parts.size() ? Node::make_mapping() : Node::make_null());
        next->source = value.source;
      } else if (i + 1 < parts.size() && !next->is_mapping() && !next->is_list()) {
        NRL_CHECK_ARG(!next->is_string() || next->string.find("${") == std::string::npos, "lies in ", here,
                      ", which is ", next->string, "; change the keys that it refers to");
        *next = Node::make_mapping();
        next->source = value.source;
      }
      node = next;
    }
    lay_over(*node, value, key, given);
  }

  /// As `merge`, but a plain override may not bring keys that do not exist.
  void lay_over(Node& base, const Node& value, const std::string& key, const Override& given) const {
    if (!base.is_mapping() || !value.is_mapping()) {
      base = value;
      return;
    }
    for (const auto& [name, item] : value.entries) {
      const std::string here = key + "." + name;
      Node* old = base.find(name);
      if (old == nullptr) {
        if (!may_create(here, given)) throw UnknownKey(here, "does not exist; to add a key write +" + given.text);
        old = &base.set(name, Node::make_null());
      }
      lay_over(*old, item, here, given);
    }
  }

  Node& tree_;
  const OverrideRules& rules_;
  std::map<std::string, std::pair<std::string, Node>> spellings_;  // canonical key -> what set it
};

}  // namespace

void apply_overrides(Node& tree, const std::vector<std::string>& overrides, const OverrideRules& rules,
                     std::vector<Problem>& problems) {
  Applier applier(tree, rules);
  for (const std::string& text : overrides) {
    const std::string where = "override '" + shortened(text) + "'";
    std::string key;
    try {
      NRL_CHECK_ARG(first_not_utf8(text) == std::string::npos, "is not UTF-8");
      const Override parsed = parse_override(text);
      key = parsed.key;
      applier.apply(parsed);
    } catch (const UnknownKey& error) {
      problems.push_back({"unknown_key", error.key, where, error.what()});
    } catch (const ArgumentError& error) {
      problems.push_back({"override", key, where, error.what()});
    }
  }
}

}  // namespace nemo_rl::config
