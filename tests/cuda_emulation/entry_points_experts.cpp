// C functions by which the tests call the CUDA launchers around the products of experts; see entry_points_model.cpp.
#include <cuda_runtime_api.h>

#include "kernels/cuda/expert_launchers.h"

using namespace nemo_rl;
using namespace nemo_rl::kernels;
using Int = std::int64_t;

namespace {

CudaRoutes routes_of(float* logits, Int E, Int k, Int* expert, float* weight) { return {logits, E, k, expert, weight}; }

}  // namespace

extern "C" {

/// groups 0: a softmax router; values: scratch [T, E + groups].
Int route_tokens(float* logits, Int T, Int E, Int k, Int groups, Int chosen_groups, Int renormalise, double scale,
                 float* bias, float* values, Int* expert, float* weight) {
  auto routes = routes_of(logits, E, k, expert, weight);
  routes.bias = bias, routes.values = values, routes.value_stride = E + groups;
  const SigmoidRouter router{groups, chosen_groups, renormalise != 0, scale};
  return route_tokens_launch(routes, T, groups > 0 ? &router : nullptr, renormalise != 0, nullptr);
}

Int route_tokens_backward(float* logits, Int T, Int E, Int k, Int groups, Int renormalise, double scale, Int* expert,
                          float* weight, float* d_weight, float* d_logits) {
  const SigmoidRouter router{groups, groups, renormalise != 0, scale};
  return route_tokens_backward_launch(routes_of(logits, E, k, expert, weight), T, groups > 0 ? &router : nullptr,
                                      renormalise != 0, d_weight, d_logits, nullptr);
}

Int add_up_experts(float* rows, Int* row, float* weight, Int k, Int T, Int D, float* y, Int accumulate) {
  return add_up_experts_launch({rows, row, weight, k, T, D, y, accumulate != 0}, nullptr);
}

Int row_products(void* a, void* b, float* out, Int rows, Int columns, Int bf16) {
  if (bf16)
    return row_products_launch(static_cast<bfloat16*>(a), static_cast<bfloat16*>(b), out, rows, columns, nullptr);
  return row_products_launch(static_cast<float*>(a), static_cast<float*>(b), out, rows, columns, nullptr);
}

}  // extern "C"
