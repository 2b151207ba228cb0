// The configuration tree: values as YAML gives them, each with the place it was written. No YAML library here.
#pragma once
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace nemo_rl::config {

/// Where a value was written: a file and a line (from 1), or an override of the command line (line 0).
struct Source {
  std::string file;
  int line = 0;

  /// "grpo.yaml:12", or "override 'a.b=c'".
  std::string text() const { return line > 0 ? file + ":" + std::to_string(line) : file; }
};

enum class Kind { null, boolean, integer, real, string, list, mapping };

/// "a mapping", "the integer 3": for messages.
const char* kind_name(Kind kind);

/// One value of the tree. Only the member that `kind` names is meaningful.
struct Node {
  struct Entry;  // of a mapping: a key and its value

  Kind kind = Kind::null;
  bool boolean = false;
  std::int64_t integer = 0;
  double real = 0;
  std::string string;
  std::vector<Node> items;
  std::vector<Entry> entries;  // in the order written; keys are unique
  Source source;

  static Node make_null();
  static Node make_bool(bool value);
  static Node make_int(std::int64_t value);
  static Node make_real(double value);
  static Node make_string(std::string value);
  static Node make_list();
  static Node make_mapping();

  bool is_mapping() const { return kind == Kind::mapping; }
  bool is_list() const { return kind == Kind::list; }
  bool is_null() const { return kind == Kind::null; }
  bool is_string() const { return kind == Kind::string; }
  bool is_number() const { return kind == Kind::integer || kind == Kind::real || kind == Kind::boolean; }

  /// The value as a number; only where is_number().
  double number() const {
    return kind == Kind::real ? real : kind == Kind::boolean ? boolean : static_cast<double>(integer);
  }

  /// The entry of a mapping, or the element of a list when the key is its number; nullptr if there is none.
  Node* find(const std::string& key);
  const Node* find(const std::string& key) const { return const_cast<Node*>(this)->find(key); }

  /// Sets the entry of a mapping, in place if the key exists, else at the end.
  Node& set(const std::string& key, Node value);
  bool erase(const std::string& key);

  /// Equal values; sources are not compared.
  bool same_value(const Node& other) const;

 private:
  static Node of(Kind kind);
};

// Defined after Node, and no std::pair: clang with libstdc++ instantiates a pair of an incomplete type and fails.
struct Node::Entry {
  Entry(std::string name, Node value) : first(std::move(name)), second(std::move(value)) {}

  std::string first;
  Node second;
};

/// "a.b.0.c" split at the dots.
std::vector<std::string> split_key(const std::string& dotted);
std::string join_key(const std::vector<std::string>& parts, std::size_t count);

/// The node at a dotted key, or nullptr.
Node* find_path(Node& root, const std::string& dotted);

/// A mistake that one file or override holds.
struct Problem {
  std::string kind;     // "override", "unknown_key", "interpolation", "alias"
  std::string key;      // dotted
  std::string where;    // Source::text()
  std::string message;  // a sentence without key and place
};

/// A mistake after which the tree cannot be built. `kind`: "missing_file", "cycle", "root", "syntax", "duplicate".
class LoadError : public std::runtime_error {
 public:
  LoadError(std::string kind, const std::string& message) : std::runtime_error(message), kind_(std::move(kind)) {}
  const std::string& kind() const { return kind_; }

 private:
  std::string kind_;
};

}  // namespace nemo_rl::config
