// The _C module: the list of its areas and nothing else.
#include "bindings/module.h"

#include "common/cpu_capability.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ core of nemo_rl_cpp; use it through the Python package";
  m.attr("torch_version") = NEMO_TORCH_VERSION;
  m.attr("cuda_compiled") = static_cast<bool>(NEMO_HAVE_CUDA);
  m.def("cpu_capability", &nemo_rl::cpu_capability_name, "The instruction set that the CPU kernels use");
  nemo_rl::bindings::bind_losses(m);
  nemo_rl::bindings::bind_advantages(m);
  nemo_rl::bindings::bind_batching(m);
  nemo_rl::bindings::bind_attention(m);
  nemo_rl::bindings::bind_recurrence(m);
  nemo_rl::bindings::bind_ops(m);
  nemo_rl::bindings::bind_distributed(m);
  nemo_rl::bindings::bind_refit(m);
  nemo_rl::bindings::bind_model(m);
  nemo_rl::bindings::bind_generation(m);
  nemo_rl::bindings::bind_resident(m);
}
