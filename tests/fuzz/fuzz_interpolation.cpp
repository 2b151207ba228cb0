// Whatever stands between `${` and `}`: a value or a problem, with a tree of bounded size.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "config/interpolate.h"
#include "config/limits.h"
#include "config/yaml_reader.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace nemo_rl::config;
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (first_not_utf8(text) != std::string::npos) return 0;  // no tree holds such a text
  Node tree = read_yaml("a: 1\nb:\n  c: [1, {d: x}]\n  e:\n  f: ${.c}\n  g: ${..a}\nh: ${add:${a},2}\n", "fuzz.yaml");
  for (std::size_t begin = 0, i = 0; begin <= text.size(); ++i) {  // a value a line: k0, k1, ...
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    tree.set("k" + std::to_string(i), Node::make_string(text.substr(begin, end - begin)));
    begin = end + 1;
  }
  const std::size_t before = count_values(tree);
  std::vector<Problem> problems;
  resolve_interpolations(tree, {{"old", "a"}}, problems);
  if (count_values(tree) > before + kMostValues) std::abort();
  for (const Problem& problem : problems)
    if (problem.message.empty() || first_not_utf8(problem.message) != std::string::npos) std::abort();
  return 0;
}
