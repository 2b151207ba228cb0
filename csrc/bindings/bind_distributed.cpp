// The communicator of a run's processes.
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "bindings/module.h"
#include "distributed/nccl_communicator.h"
#include "distributed/self_test.h"

namespace nemo_rl::bindings {
namespace {

/// A Python exception class with the attributes rank, phase and seconds. What is bound later is tried first.
template <class Error>
py::object bind_error(py::module_& m, const char* name, py::handle base) {
  static py::object type = py::reinterpret_steal<py::object>(
      PyErr_NewException((std::string("nemo_rl_cpp._C.") + name).c_str(), base.ptr(), nullptr));
  m.attr(name) = type;
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& error) {
      py::object made = type(error.what());
      made.attr("rank") = error.rank;
      made.attr("phase") = error.phase;
      made.attr("seconds") = error.seconds;
      PyErr_SetObject(type.ptr(), made.ptr());
    }
  });
  return type;
}

}  // namespace

void bind_distributed(py::module_& m) {
  using namespace distributed;
  const py::object error = bind_error<CommunicatorError>(m, "CommunicatorError", PyExc_RuntimeError);
  bind_error<PeerLost>(m, "PeerLost", error);
  bind_error<TimedOut>(m, "TimedOut", error);
  const auto phase = [] { return py::arg("phase"); };
  py::class_<Communicator, std::shared_ptr<Communicator>>(m, "Communicator", "See csrc/distributed/communicator.h")
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def("all_to_all", &Communicator::all_to_all, py::arg("out"), py::arg("input"), phase(), release_gil())
      .def("all_gather", &Communicator::all_gather, py::arg("out"), py::arg("input"), phase(), release_gil())
      .def("broadcast", &Communicator::broadcast, py::arg("tensor"), py::arg("root"), phase(), release_gil())
      .def("send", &Communicator::send, py::arg("tensor"), py::arg("to"), phase(), release_gil())
      .def("receive", &Communicator::receive, py::arg("tensor"), py::arg("source"), phase(), release_gil())
      .def("barrier", &Communicator::barrier, phase(), release_gil());
  m.def("gloo_communicator", &gloo_communicator, py::arg("group_name"), py::arg("seconds"));
  m.def("nccl_communicator", &nccl_communicator, py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("device"),
        py::arg("seconds"), release_gil());
  m.def("nccl_greeting", &nccl_greeting, py::arg("communicator"), phase(), release_gil());
  m.def("communicator_through_cpu", &communicator_through_cpu, py::arg("on_cpu"));
  m.def("self_test", &self_test, py::arg("communicator"), py::arg("device"), py::arg("elements"), release_gil());
  m.def("communicator_by_device", &communicator_by_device, py::arg("on_cpu"), py::arg("on_device"));
}

}  // namespace nemo_rl::bindings
