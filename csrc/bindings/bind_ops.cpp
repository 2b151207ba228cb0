// Single ops, for tests, benchmarks and notebooks; the model calls them inside C++.
#include "bindings/model_config.h"
#include "bindings/module.h"
#include "ops/adamw.h"
#include "ops/advantages.h"
#include "ops/linear.h"
#include "ops/packed_weights.h"
#include "ops/swiglu.h"
#include "ops/weight_blocks.h"

namespace nemo_rl::bindings {

namespace {

void bind_packed_weights(py::module_& m) {
  using ops::PackedWeights;
  py::class_<PackedWeights>(m, "PackedWeights", "See csrc/ops/packed_weights.h")
      .def(py::init<>())
      .def_static("most_rows", &PackedWeights::most_rows)
      .def("pack", &PackedWeights::pack, py::arg("w"), py::arg("gated"), release_gil())
      .def("holds", &PackedWeights::holds, py::arg("w"))
      .def("clear", &PackedWeights::clear)
      .def_property_readonly("bytes", &PackedWeights::bytes);
}

void bind_weight_blocks(py::module_& m) {
  m.def(
      "block_bytes", [](const std::string& format) { return kernels::block_bytes(ops::block_format(format)); },
      py::arg("format"), "Bytes of a block of 32 weights");
  m.def(
      "zero_blocks",
      [](std::int64_t rows, std::int64_t columns, const std::string& format) {
        return ops::zero_blocks(rows, columns, ops::block_format(format));
      },
      py::arg("rows"), py::arg("columns"), py::arg("format"));
  m.def("pack_blocks", &ops::pack_blocks, py::arg("w"), py::arg("blocks"), py::arg("first") = 0, release_gil());
  m.def("write_block_rows", &ops::write_block_rows, py::arg("rows"), py::arg("blocks"), py::arg("columns"),
        py::arg("first") = 0, release_gil());
  m.def("read_block_rows", &ops::read_block_rows, py::arg("blocks"), py::arg("columns"), py::arg("first"),
        py::arg("count"), release_gil());
  m.def("unpack_blocks", &ops::unpack_blocks, py::arg("blocks"), py::arg("w"), py::arg("first") = 0, release_gil());
}

}  // namespace

void bind_ops(py::module_& m) {
  bind_packed_weights(m);
  bind_weight_blocks(m);
  m.def("linear_forward", &ops::linear_forward, py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("y"),
        py::arg("accumulate") = false, py::arg("packed") = nullptr, release_gil());
  m.def(
      "linear_swiglu",
      [](const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
         const std::optional<at::Tensor>& gate_up, const at::Tensor& act, const ops::PackedWeights* packed,
         const std::string& activation) {
        const auto gate = gate_from(activation);
        py::gil_scoped_release release;
        ops::linear_swiglu(x, w, bias, gate_up.value_or(at::Tensor()), act, gate, packed);
      },
      py::arg("x"), py::arg("w"), py::arg("bias"), py::arg("gate_up"), py::arg("act"), py::arg("packed") = nullptr,
      py::arg("activation") = "silu");
  m.def(
      "swiglu_forward",
      [](const at::Tensor& gate_up, const at::Tensor& act, const std::string& activation) {
        const auto gate = gate_from(activation);
        py::gil_scoped_release release;
        ops::swiglu_forward(gate_up, act, gate);
      },
      py::arg("gate_up"), py::arg("act"), py::arg("activation") = "silu");
  m.def(
      "swiglu_backward",
      [](const at::Tensor& d_act, const at::Tensor& gate_up, const at::Tensor& d_gate_up,
         const std::string& activation) {
        const auto gate = gate_from(activation);
        py::gil_scoped_release release;
        ops::swiglu_backward(d_act, gate_up, d_gate_up, gate);
      },
      py::arg("d_act"), py::arg("gate_up"), py::arg("d_gate_up"), py::arg("activation") = "silu");
  m.def("linear_backward_input", &ops::linear_backward_input, py::arg("dy"), py::arg("w"), py::arg("dx"),
        py::arg("accumulate") = false, release_gil());
  m.def(
      "adamw_step",
      [](const at::Tensor& weights, const at::Tensor& grads, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq,
         const std::optional<at::Tensor>& compute, double lr, double beta1, double beta2, double eps,
         double weight_decay, std::int64_t step, std::int64_t first, const std::optional<at::Tensor>& remainders) {
        ops::adamw_step({weights, grads, exp_avg, exp_avg_sq, compute, first, remainders},
                        {lr, beta1, beta2, eps, weight_decay}, step, 1.0);
      },
      py::arg("weights"), py::arg("grads"), py::arg("exp_avg"), py::arg("exp_avg_sq"), py::arg("compute"),
      py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"), py::arg("step"),
      py::arg("first") = 0, py::arg("remainders") = py::none(), release_gil());
  m.def("split_weights", &ops::split_weights, py::arg("weights"), py::arg("compute"), py::arg("remainders"));
  m.def(
      "whiten_",
      [](at::Tensor values, const at::Tensor& mask) {
        return ops::whiten_(values, mask, kernels::WhitenRule::unbiased_added, true);
      },
      py::arg("values"), py::arg("mask"), "In place, as after GAE; whether there were too few valid tokens",
      release_gil());
  m.def("linear_backward_weight", &ops::linear_backward_weight, py::arg("dy"), py::arg("x"), py::arg("dw"),
        release_gil());
}

}  // namespace nemo_rl::bindings
