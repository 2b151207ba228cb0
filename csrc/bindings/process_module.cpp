// Module _process: signals, in C++ where no interpreter lock holds them up.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "process/signal_watch.h"

namespace py = pybind11;
using nemo_rl::process::SignalWatch;

PYBIND11_MODULE(_process, m) {
  m.doc() = "Signals; see csrc/process";
  py::class_<SignalWatch>(m, "SignalWatch", "See csrc/process/signal_watch.h")
      .def(py::init([](int read_end, int forward_to, std::vector<int> signals, double grace_seconds) {
             return std::make_unique<SignalWatch>(read_end, forward_to, std::move(signals),
                                                  std::chrono::duration<double>(grace_seconds));
           }),
           py::arg("read_end"), py::arg("forward_to"), py::arg("signals"), py::arg("grace_seconds"))
      .def("close", &SignalWatch::close, py::arg("write_end"), py::call_guard<py::gil_scoped_release>());
}
