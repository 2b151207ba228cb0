// From a file and overrides to the resolved tree: what the configuration module offers.
#pragma once
#include <string>
#include <vector>

#include "config/inherit.h"
#include "config/node.h"
#include "config/override.h"

namespace nemo_rl::config {

struct LoadedConfig {
  Node tree;                      // resolved
  std::vector<Problem> problems;  // everything that went wrong on the way
};

/// Loads a file with its parents (see `load_with_parents` for `folders`), applies overrides, then resolves
/// interpolations. Mistakes are collected in `problems`; only what leaves no tree at all (LoadError) is thrown.
LoadedConfig load_config(const std::string& path, const std::vector<std::string>& overrides, const OverrideRules& rules,
                         const std::vector<std::string>& folders = {});

}  // namespace nemo_rl::config
