// The functions that an interpolation may call: ${mul:2,${a}}.
#pragma once
#include <string>
#include <vector>

#include "config/node.h"

namespace nemo_rl::config {

/// Calls `mul`, `add`, `sub`, `div`, `max` (two numbers; `mul` repeats a text, `add` joins two, `div` gives a float) or
/// `oc.env` (NAME, or NAME and a default). Throws std::invalid_argument.
Node call_resolver(const std::string& name, const std::vector<Node>& arguments);

}  // namespace nemo_rl::config
