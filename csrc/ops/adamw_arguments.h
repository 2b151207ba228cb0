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
  return {mutable_ptr<A>(b.weights),
          ptr<A>(b.grads),
          mutable_ptr<M>(b.exp_avg),
          mutable_ptr<V>(b.exp_avg_sq),
          b.compute ? mutable_ptr<bfloat16>(*b.compute) : nullptr,
          s.lr,
          s.beta1,
          s.beta2,
          s.eps,
          s.weight_decay,
          1.0 - std::pow(s.beta1, static_cast<double>(step)),
          1.0 - std::pow(s.beta2, static_cast<double>(step)),
          grad_scale,
          step,
          b.first};
}

}  // namespace nemo_rl::ops
