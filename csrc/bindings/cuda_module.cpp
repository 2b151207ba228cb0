// The _cuda module: loading it registers the CUDA launchers (each csrc/ops/*_cuda.cpp does so for its ops). It has no
// functions of its own; nemo_rl_cpp loads it where torch is a CUDA build.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_cuda, m) { m.doc() = "CUDA kernels of nemo_rl_cpp; importing it makes them available to the ops"; }
