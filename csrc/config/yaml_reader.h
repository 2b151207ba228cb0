// Text of one YAML file -> tree with positions.
#pragma once
#include <string>

#include "config/node.h"

namespace nemo_rl::config {

/// Parses one YAML document. `file` names it in positions and messages. Anchors, aliases and `<<` merges are resolved.
/// Throws LoadError: "syntax" (malformed, more than one document, an unknown tag) or "duplicate" (a key twice in one
/// mapping).
Node read_yaml(const std::string& text, const std::string& file);

}  // namespace nemo_rl::config
