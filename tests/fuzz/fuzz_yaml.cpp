// Any bytes are a configuration or a LoadError, whose message is text.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "config/limits.h"
#include "config/yaml_reader.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace nemo_rl::config;
  try {
    const Node tree = read_yaml(std::string(reinterpret_cast<const char*>(data), size), "fuzz.yaml");
    if (count_values(tree) > 2 * kMostValues + 1) std::abort();
  } catch (const LoadError& error) {
    if (first_not_utf8(error.what()) != std::string::npos) std::abort();
  }
  return 0;
}
