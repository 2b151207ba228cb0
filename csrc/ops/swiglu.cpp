#include "ops/swiglu.h"

#include <ATen/ops/clamp_min.h>

#include "kernels/swiglu.h"
#include "ops/kernel_types.h"
#include "runtime/parallel_items.h"

namespace nemo_rl::ops {

runtime::CudaSlot<void(const at::Tensor&, const at::Tensor&, kernels::Gate)> swiglu_forward_cuda("swiglu_forward");
runtime::CudaSlot<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, kernels::Gate)> swiglu_backward_cuda(
    "swiglu_backward");

namespace {

void check(const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation) {
  NRL_CHECK_ARG(gate_up.dim() == 2 && gate_up.is_contiguous() && act.is_contiguous() &&
                    act.size(0) == gate_up.size(0) &&
                    (kernels::has_gate(activation) ? 2 : 1) * act.size(1) == gate_up.size(1),
                "swiglu: gate_up ", gate_up.sizes(), " and act ", act.sizes(), " do not match");
}

template <class F>
void over_rows(const at::Tensor& act, F&& f) {
  runtime::parallel_rows(act.size(0), std::max<std::int64_t>(1, 8192 / std::max<std::int64_t>(1, act.size(1))), f);
}

}  // namespace

void swiglu_forward(const at::Tensor& gate_up, const at::Tensor& act, kernels::Gate activation) {
  check(gate_up, act, activation);
  if (activation == kernels::Gate::relu_squared) {  // one product, rounded once: the same bits on every processor
    at::clamp_min_out(const_cast<at::Tensor&>(act), gate_up, 0);
    act.mul_(act);
    return;
  }
  if (act.is_cuda()) return swiglu_forward_cuda.get(act)(gate_up, act, activation);
  const std::int64_t I = act.size(1);
  dispatch_floating(act.scalar_type(), "swiglu_forward", [&](auto tag) {
    using T = decltype(tag);
    over_rows(act, [&](std::int64_t begin, std::int64_t end) {
      const T* in = ptr<T>(gate_up);
      T* out = mutable_ptr<T>(act);
      if constexpr (std::is_same_v<T, float>) kernels::swiglu_forward_f32(in, out, I, activation, begin, end);
      if constexpr (std::is_same_v<T, double>) kernels::swiglu_forward_f64(in, out, I, activation, begin, end);
      if constexpr (std::is_same_v<T, bfloat16>) kernels::swiglu_forward_bf16(in, out, I, activation, begin, end);
    });
  });
}

void swiglu_backward(const at::Tensor& d_act, const at::Tensor& gate_up, const at::Tensor& d_gate_up,
                     kernels::Gate activation) {
  check(gate_up, d_act, activation);
  check(d_gate_up, d_act, activation);
  if (activation == kernels::Gate::relu_squared) {
    at::clamp_min_out(const_cast<at::Tensor&>(d_gate_up), gate_up, 0);
    d_gate_up.mul_(d_act).mul_(2);
    return;
  }
  if (d_act.is_cuda()) return swiglu_backward_cuda.get(d_act)(d_act, gate_up, d_gate_up, activation);
  const std::int64_t I = d_act.size(1);
  dispatch_floating(d_act.scalar_type(), "swiglu_backward", [&](auto tag) {
    using T = decltype(tag);
    over_rows(d_act, [&](std::int64_t begin, std::int64_t end) {
      const T *d = ptr<T>(d_act), *in = ptr<T>(gate_up);
      T* out = mutable_ptr<T>(d_gate_up);
      if constexpr (std::is_same_v<T, float>) kernels::swiglu_backward_f32(d, in, out, I, activation, begin, end);
      if constexpr (std::is_same_v<T, double>) kernels::swiglu_backward_f64(d, in, out, I, activation, begin, end);
      if constexpr (std::is_same_v<T, bfloat16>) kernels::swiglu_backward_bf16(d, in, out, I, activation, begin, end);
    });
  });
}

}  // namespace nemo_rl::ops
