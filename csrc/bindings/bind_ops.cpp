// Single ops, for tests, benchmarks and notebooks; the model calls them inside C++.
#include "bindings/module.h"
#include "ops/linear.h"

namespace nemo_rl::bindings {

void bind_ops(py::module_& m) {
  m.def("linear_forward", &ops::linear_forward, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"), py::arg("accumulate") = false,
        release_gil());
  m.def("linear_backward_input", &ops::linear_backward_input, py::arg("dy"), py::arg("w"), py::arg("dx"), py::arg("accumulate") = false,
        release_gil());
  m.def("linear_backward_weight", &ops::linear_backward_weight, py::arg("dy"), py::arg("x"), py::arg("dw"), release_gil());
}

}  // namespace nemo_rl::bindings
