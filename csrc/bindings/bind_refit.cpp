// Weights for engines in other processes.
#include "bindings/module.h"
#include "refit/refit.h"

namespace nemo_rl::bindings {

void bind_refit(py::module_& m) {
  using namespace refit;
  py::register_exception<RefitRefused>(m, "RefitRefused", PyExc_RuntimeError);
  py::register_exception<PeerRefused>(m, "PeerRefused", PyExc_RuntimeError);
  py::class_<Transfer>(m, "RefitTransfer", "See csrc/refit/refit.h")
      .def_readonly("bytes", &Transfer::bytes)
      .def_readonly("sent", &Transfer::sent)
      .def_readonly("buckets", &Transfer::buckets)
      .def_readonly("seconds", &Transfer::seconds);
  py::class_<Publisher>(m, "RefitPublisher", "Rank 0's side of a refit; see csrc/refit/refit.h")
      .def(py::init<std::shared_ptr<distributed::Communicator>, std::int64_t, bool, bool>(), py::arg("communicator"),
           py::arg("bucket_bytes"), py::arg("delta") = false, py::arg("in_place") = true)
      .def("publish", &Publisher::publish, py::arg("weights"), py::arg("version"), release_gil());
  py::class_<Receiver>(m, "RefitReceiver", "The other ranks' side of a refit; see csrc/refit/refit.h")
      .def(py::init<std::shared_ptr<distributed::Communicator>, NamedTensors>(), py::arg("communicator"),
           py::arg("weights"))
      .def("receive", &Receiver::receive, py::arg("version"), release_gil());
}

}  // namespace nemo_rl::bindings
