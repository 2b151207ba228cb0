// How text becomes a value: YAML's plain scalars, numbers on the command line, and values back to text.
#pragma once
#include <optional>
#include <string>

#include "config/node.h"

namespace nemo_rl::config {

/// Type of a plain (unquoted) YAML scalar by the rules of YAML 1.1 as PyYAML and OmegaConf read them: `yes`/`off` are
/// booleans, `010` is octal, `1_000` is 1000, `12:30:45` is sexagesimal, `1e-8` is a float, dates stay strings, and
/// `inf`/`nan` need their dot. An integer beyond 64 bits throws std::out_of_range.
Node yaml_scalar(const std::string& text);

/// A number, boolean or null as overrides and resolver arguments write them (`1_000`, `5.0e-6`, `inf`, `TRUE`, `null`);
/// nothing if the text is none of these.
std::optional<Node> literal(const std::string& text);

/// Length of the number that starts at `begin` (0 if none); `is_real` tells a float from an integer.
std::size_t match_number(const std::string& text, std::size_t begin, bool* is_real);

/// A scalar as Python's str() writes it: True, None, 1e-08, 0.5.
std::string python_text(const Node& node);

}  // namespace nemo_rl::config
