#include "config/loader.h"

#include "config/interpolate.h"

namespace nemo_rl::config {

LoadedConfig load_config(const std::string& path, const std::vector<std::string>& overrides, const OverrideRules& rules,
                         const std::vector<std::string>& folders) {
  LoadedConfig config;
  config.tree = load_with_parents(path, "", folders, rules.aliases, config.problems);
  apply_overrides(config.tree, overrides, rules, config.problems);
  resolve_interpolations(config.tree, rules.aliases, config.problems);
  return config;
}

}  // namespace nemo_rl::config
