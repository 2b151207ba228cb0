// ${a.b}, ${.sibling}, ${..uncle}, text with ${...} inside, and the resolvers mul, add, sub, div, max, oc.env.
#pragma once
#include <string>
#include <vector>

#include "config/inherit.h"
#include "config/node.h"

namespace nemo_rl::config {

/// Replaces every interpolation of the tree by its value. A value that cannot be resolved becomes null and is reported;
/// all failures are collected. A key of an interpolation may be written with an alias. `\${` stands for a literal `${`.
void resolve_interpolations(Node& tree, const std::vector<Alias>& aliases, std::vector<Problem>& problems);

}  // namespace nemo_rl::config
