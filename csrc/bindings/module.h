// One bind_<area>.cpp an area; each holds no arithmetic. torch's own pybind11 casters make at::Tensor an argument.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace nemo_rl::bindings {

namespace py = pybind11;
using release_gil = py::call_guard<py::gil_scoped_release>;

void bind_losses(py::module_& m);
void bind_advantages(py::module_& m);
void bind_batching(py::module_& m);
void bind_attention(py::module_& m);
void bind_ops(py::module_& m);
void bind_recurrence(py::module_& m);
void bind_distributed(py::module_& m);
void bind_refit(py::module_& m);
void bind_model(py::module_& m);
void bind_generation(py::module_& m);
void bind_resident(py::module_& m);

}  // namespace nemo_rl::bindings
