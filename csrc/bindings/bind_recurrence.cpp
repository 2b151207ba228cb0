// The parts of recurrent layers for tests and benchmarks: the decoder calls the C++ ops directly.
#include <ATen/ops/empty_strided.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "bindings/module.h"
#include "ops/gated_delta.h"
#include "runtime/tensor.h"

namespace nemo_rl::bindings {
namespace {

using SequenceTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, bool>;
using ShapeTuple = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
using Limits = std::pair<double, double>;

std::vector<ops::RecurrentSequence> sequences_of(const std::vector<SequenceTuple>& tuples) {
  std::vector<ops::RecurrentSequence> result;
  for (const auto& [start, length, parent, slot, continues] : tuples)
    result.push_back({start, length, parent, slot, continues});
  return result;
}

ops::RecurrentShape shape_of(const ShapeTuple& t) {
  return {std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t), std::get<4>(t)};
}

ops::RecurrentShape mamba2_shape(const ShapeTuple& t, const Limits& limits) {
  auto shape = shape_of(t);
  shape.rule = kernels::Recurrence::mamba2;
  shape.least_step = limits.first, shape.greatest_step = limits.second;
  return shape;
}

at::Tensor accumulated(const at::Tensor& like, at::IntArrayRef shape) {
  return at::zeros(shape, like.options().dtype(like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat));
}

}  // namespace

void bind_recurrence(py::module_& m) {
  m.def(
      "short_conv",
      [](const at::Tensor& x, const at::Tensor& w, const std::vector<SequenceTuple>& sequences,
         const std::optional<at::Tensor>& state, const std::optional<at::Tensor>& bias, bool silu) {
        const auto y = at::empty(x.sizes(), x.options());
        ops::short_conv_forward(x, {w, bias.value_or(at::Tensor()), silu}, sequences_of(sequences), y,
                                state.value_or(at::Tensor()));
        return y;
      },
      py::arg("x"), py::arg("w"), py::arg("sequences"), py::arg("state") = py::none(), py::arg("bias") = py::none(),
      py::arg("silu") = true, release_gil(),
      "y [T, C]; sequences are (start, length, parent or -1, slot or -1, continues)");
  m.def(
      "short_conv_backward",
      [](const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, const std::vector<SequenceTuple>& sequences,
         const std::optional<at::Tensor>& bias, bool silu) {
        const auto dx = at::empty(x.sizes(), x.options()), dw = accumulated(x, w.sizes()),
                   d_bias = accumulated(x, {w.size(0)});
        ops::short_conv_backward(dy, x, {w, bias.value_or(at::Tensor()), silu}, sequences_of(sequences), dx,
                                 {dw, d_bias});
        return std::make_tuple(dx, dw, d_bias);
      },
      py::arg("dy"), py::arg("x"), py::arg("w"), py::arg("sequences"), py::arg("bias") = py::none(),
      py::arg("silu") = true, release_gil(), "(dx, dw, the gradient of the bias)");
  m.def(
      "gated_delta",
      [](const at::Tensor& qkv, const at::Tensor& b, const at::Tensor& a, const at::Tensor& A_log,
         const at::Tensor& dt_bias, const std::vector<SequenceTuple>& sequences, const ShapeTuple& shape,
         const std::optional<at::Tensor>& state) {
        const auto s = shape_of(shape);
        const auto out = at::empty({qkv.size(0), s.value_size()}, qkv.options());
        ops::recurrence_forward({qkv, b, a, A_log, dt_bias, {}}, sequences_of(sequences), s, out,
                                state.value_or(at::Tensor()));
        return out;
      },
      py::arg("qkv"), py::arg("b"), py::arg("a"), py::arg("A_log"), py::arg("dt_bias"), py::arg("sequences"),
      py::arg("shape"), py::arg("state") = py::none(), release_gil(),
      "out [T, U*dv]; shape is (key heads, value heads, dk, dv, width of the convolution)");
  m.def(
      "gated_delta_backward",
      [](const at::Tensor& d_out, const at::Tensor& qkv, const at::Tensor& b, const at::Tensor& a,
         const at::Tensor& A_log, const at::Tensor& dt_bias, const std::vector<SequenceTuple>& sequences,
         const ShapeTuple& shape) {
        const ops::RecurrenceInputs d{at::empty(qkv.sizes(), qkv.options()), at::empty(b.sizes(), b.options()),
                                      at::empty(a.sizes(), a.options()),     accumulated(qkv, A_log.sizes()),
                                      accumulated(qkv, dt_bias.sizes()),     at::Tensor()};
        ops::recurrence_backward(d_out, {qkv, b, a, A_log, dt_bias, {}}, sequences_of(sequences), shape_of(shape), d);
        return std::make_tuple(d.qkv, d.b, d.a, d.A_log, d.dt_bias);
      },
      py::arg("d_out"), py::arg("qkv"), py::arg("b"), py::arg("a"), py::arg("A_log"), py::arg("dt_bias"),
      py::arg("sequences"), py::arg("shape"), release_gil(), "Gradients of qkv, b, a, A_log and dt_bias");
  m.def(
      "mamba2",
      [](const at::Tensor& vkq, const at::Tensor& a, const at::Tensor& A_log, const at::Tensor& dt_bias,
         const at::Tensor& D, const std::vector<SequenceTuple>& sequences, const ShapeTuple& shape,
         const Limits& limits, const std::optional<at::Tensor>& state) {
        const auto s = mamba2_shape(shape, limits);
        const auto out = at::empty({vkq.size(0), s.value_size()}, vkq.options());
        ops::recurrence_forward({vkq, {}, a, A_log, dt_bias, D}, sequences_of(sequences), s, out,
                                state.value_or(at::Tensor()));
        return out;
      },
      py::arg("vkq"), py::arg("a"), py::arg("A_log"), py::arg("dt_bias"), py::arg("D"), py::arg("sequences"),
      py::arg("shape"), py::arg("limits"), py::arg("state") = py::none(), release_gil(),
      "out [T, U*dv]; limits are the least and the greatest time step, the shape is that of gated_delta");
  m.def(
      "mamba2_backward",
      [](const at::Tensor& d_out, const at::Tensor& vkq, const at::Tensor& a, const at::Tensor& A_log,
         const at::Tensor& dt_bias, const at::Tensor& D, const std::vector<SequenceTuple>& sequences,
         const ShapeTuple& shape, const Limits& limits) {
        const ops::RecurrenceInputs d{at::empty(vkq.sizes(), vkq.options()), {},
                                      at::empty(a.sizes(), a.options()),     accumulated(vkq, A_log.sizes()),
                                      accumulated(vkq, dt_bias.sizes()),     accumulated(vkq, D.sizes())};
        ops::recurrence_backward(d_out, {vkq, {}, a, A_log, dt_bias, D}, sequences_of(sequences),
                                 mamba2_shape(shape, limits), d);
        return std::make_tuple(d.qkv, d.a, d.A_log, d.dt_bias, d.D);
      },
      py::arg("d_out"), py::arg("vkq"), py::arg("a"), py::arg("A_log"), py::arg("dt_bias"), py::arg("D"),
      py::arg("sequences"), py::arg("shape"), py::arg("limits"), release_gil(),
      "Gradients of vkq, a, A_log, dt_bias and D");
  m.def(
      "gated_norm",
      [](const at::Tensor& x, const at::Tensor& z, const at::Tensor& w, double eps, std::int64_t groups) {
        const auto y = at::empty(x.sizes(), x.options());
        ops::gated_norm_forward(x, z, w, groups, eps, y);
        return y;
      },
      py::arg("x"), py::arg("z"), py::arg("w"), py::arg("eps"), py::arg("groups") = 0, release_gil());
  m.def(
      "gated_norm_backward",
      [](const at::Tensor& dy, const at::Tensor& x, const at::Tensor& z, const at::Tensor& w, double eps,
         std::int64_t groups) {
        const auto dx = at::empty(x.sizes(), x.options()), dz = at::empty(x.sizes(), x.options()),
                   dw = accumulated(x, w.sizes());
        ops::gated_norm_backward(dy, x, z, w, groups, eps, dx, dz, dw);
        return std::make_tuple(dx, dz, dw);
      },
      py::arg("dy"), py::arg("x"), py::arg("z"), py::arg("w"), py::arg("eps"), py::arg("groups") = 0, release_gil(),
      "(dx, dz, dw)");
  m.def(
      "head_gate",
      [](const at::Tensor& x, const at::Tensor& g) {
        const auto y = at::empty(x.sizes(), x.options());
        ops::head_gate_forward(x, g, y);
        return y;
      },
      py::arg("x"), py::arg("g"), release_gil(), "y [T, N*H] = x * sigmoid(g), g [T, N, H]");
  m.def(
      "head_gate_backward",
      [](const at::Tensor& dy, const at::Tensor& x, const at::Tensor& g) {
        const auto dx = at::empty(x.sizes(), x.options());
        const auto dg = at::empty_strided(g.sizes(), g.strides(), g.options());
        ops::head_gate_backward(dy, x, g, dx, dg);
        return std::make_pair(dx, dg);
      },
      py::arg("dy"), py::arg("x"), py::arg("g"), release_gil(), "(dx, dg)");
}

}  // namespace nemo_rl::bindings
