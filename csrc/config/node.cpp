#include "config/node.h"

#include <algorithm>
#include <cmath>

namespace nemo_rl::config {

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::null:
      return "null";
    case Kind::boolean:
      return "a boolean";
    case Kind::integer:
      return "an integer";
    case Kind::real:
      return "a number";
    case Kind::string:
      return "a string";
    case Kind::list:
      return "a list";
    case Kind::mapping:
      return "a mapping";
  }
  return "";
}

Node Node::of(Kind kind) {
  Node node;
  node.kind = kind;
  return node;
}

Node Node::make_null() { return of(Kind::null); }
Node Node::make_list() { return of(Kind::list); }
Node Node::make_mapping() { return of(Kind::mapping); }

Node Node::make_bool(bool value) {
  Node node = of(Kind::boolean);
  node.boolean = value;
  return node;
}

Node Node::make_int(std::int64_t value) {
  Node node = of(Kind::integer);
  node.integer = value;
  return node;
}

Node Node::make_real(double value) {
  Node node = of(Kind::real);
  node.real = value;
  return node;
}

Node Node::make_string(std::string value) {
  Node node = of(Kind::string);
  node.string = std::move(value);
  return node;
}

Node* Node::find(const std::string& key) {
  if (is_mapping()) {
    for (auto& [name, value] : entries)
      if (name == key) return &value;
  } else if (is_list() && !key.empty() && key.size() < 10 && std::all_of(key.begin(), key.end(), ::isdigit)) {
    const std::size_t index = std::stoul(key);
    if (index < items.size()) return &items[index];
  }
  return nullptr;
}

Node& Node::set(const std::string& key, Node value) {
  if (Node* old = find(key)) {
    *old = std::move(value);
    return *old;
  }
  entries.emplace_back(key, std::move(value));
  return entries.back().second;
}

bool Node::erase(const std::string& key) {
  Node* found = find(key);
  if (found == nullptr) return false;
  if (is_list()) items.erase(items.begin() + (found - items.data()));
  else std::erase_if(entries, [&](const Entry& entry) { return entry.first == key; });
  return true;
}

bool Node::same_value(const Node& other) const {
  if (is_number() && other.is_number() && (kind == Kind::boolean) == (other.kind == Kind::boolean))
    return number() == other.number() || (std::isnan(number()) && std::isnan(other.number()));
  if (kind != other.kind) return false;
  if (is_string()) return string == other.string;
  if (is_list())
    return std::equal(items.begin(), items.end(), other.items.begin(), other.items.end(),
                      [](const Node& a, const Node& b) { return a.same_value(b); });
  if (is_mapping())
    return entries.size() == other.entries.size() &&
           std::all_of(entries.begin(), entries.end(), [&](const Entry& entry) {
             const Node* theirs = other.find(entry.first);
             return theirs != nullptr && entry.second.same_value(*theirs);
           });
  return true;
}

std::vector<std::string> split_key(const std::string& dotted) {
  std::vector<std::string> parts(1);
  for (const char c : dotted) {
    if (c == '.') parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

std::string join_key(const std::vector<std::string>& parts, std::size_t count) {
  std::string joined;
  for (std::size_t i = 0; i < count; ++i) joined += (i ? "." : "") + parts[i];
  return joined;
}

Node* find_path(Node& root, const std::string& dotted) {
  Node* node = &root;
  for (const auto& part : split_key(dotted))
    if ((node = node->find(part)) == nullptr) return nullptr;
  return node;
}

}  // namespace nemo_rl::config
