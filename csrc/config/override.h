// The command line's overrides: Hydra's grammar (a.b=v, +a.b=v, ++a.b=v, ~a.b) and how each changes the tree.
#pragma once
#include <string>
#include <unordered_set>
#include <vector>

#include "config/inherit.h"
#include "config/node.h"

namespace nemo_rl::config {

enum class OverrideType { change, add, force_add, erase };

struct Override {
  OverrideType type = OverrideType::change;
  std::string key;  // dotted
  Node value;       // unset for `~key`
  bool has_value = false;
  std::string text;  // as given
};

/// Parses one override. Throws std::invalid_argument with a sentence that says what is wrong and how to write it.
Override parse_override(const std::string& text);

struct OverrideRules {
  std::vector<Alias> aliases;
  /// Keys that a plain `a.b=v` may set although the files do not hold them (they have a default elsewhere).
  std::unordered_set<std::string> known_keys;
};

/// Applies overrides in order, each seeing the ones before. Every failure is collected; a failed one leaves the tree as
/// it was.
void apply_overrides(Node& tree, const std::vector<std::string>& overrides, const OverrideRules& rules,
                     std::vector<Problem>& problems);

}  // namespace nemo_rl::config
