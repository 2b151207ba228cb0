// The kernels' arguments from the op's tensors, for the CPU and CUDA.
#pragma once
#include <cmath>

#include "kernels/adamw.h"
#include "ops/adamw.h"
#include "ops/kernel_types.h"

namespace nemo_rl::ops {

template <class A, class M, class V>
kernels::AdamWArgs<A, M, V> adamw_arguments(const AdamWBuffers& b, const AdamWSettings& s, std::int64_t step,
                                            double grad_scale) {
  const at::Tensor compute = b.remainders ? b.weights : b.compute.value_or(at::Tensor());
  return {b.remainders ? nullptr : mutable_ptr<A>(b.weights),
          ptr<A>(b.grads),
          mutable_ptr<M>(b.exp_avg),
          mutable_ptr<V>(b.exp_avg_sq),
          compute.defined() ? mutable_ptr<bfloat16>(compute) : nullptr,
          s.lr,
          s.beta1,
          s.beta2,
          s.eps,
          s.weight_decay,
          1.0 - std::pow(s.beta1, static_cast<double>(step)),
          1.0 - std::pow(s.beta2, static_cast<double>(step)),
          grad_scale,
          step,
          b.first,
          b.remainders ? mutable_ptr<std::int16_t>(*b.remainders) : nullptr};
}

}  // namespace nemo_rl::ops
