// Any line is an override that is applied, or a problem in words; the tree stays whole.
#include <cstdint>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "config/limits.h"
#include "config/override.h"
#include "config/yaml_reader.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace nemo_rl::config;
  std::istringstream lines(std::string(reinterpret_cast<const char*>(data), size));
  std::vector<std::string> overrides;
  for (std::string line; std::getline(lines, line);) overrides.push_back(line);
  Node tree = read_yaml("a: 1\nb: {c: [1, {d: x}], e: null}\nf: ${a}\n", "fuzz.yaml");
  std::vector<Problem> problems;
  apply_overrides(tree, overrides, {{{"b.old", "b.e"}}, {"b.known"}}, problems);
  if (!tree.is_mapping()) std::abort();
  for (const Problem& problem : problems)
    if (problem.message.empty()) std::abort();
  return 0;
}
