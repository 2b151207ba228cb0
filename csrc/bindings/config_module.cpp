// The _config module: YAML only, no torch, so that a mistake in a configuration is reported within a second.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_config, m) { m.doc() = "Configuration loader of nemo_rl_cpp (yaml-cpp)"; }
