// Host functions that launch the CUDA kernels around the products of experts (ops/experts.h). All pointers are device
// pointers. They return what cudaGetLastError says after the launch.
#pragma once
#include <cuda_runtime_api.h>

#include "common/bfloat16.h"
#include "kernels/experts.h"

namespace nemo_rl::kernels {

using CudaRoutes = TokenRoutes<float>;
/// `router` null: softmax, with `renormalise`.
cudaError_t route_tokens_launch(const CudaRoutes& routes, std::int64_t tokens, const SigmoidRouter* router,
                                bool renormalise, cudaStream_t stream);
cudaError_t route_tokens_backward_launch(const CudaRoutes& routes, std::int64_t tokens, const SigmoidRouter* router,
                                         bool renormalise, const float* d_weight, float* d_logits, cudaStream_t stream);

/// Arguments of ops::add_up_experts.
struct AddUpArgs {
  const float* rows;
  const std::int64_t* row;  ///< null: each pair lies in the row of its number
  const float* weight;      ///< null: 1
  std::int64_t k, T, D;
  float* y;
  bool accumulate;
};
cudaError_t add_up_experts_launch(const AddUpArgs& args, cudaStream_t stream);

template <class T>
cudaError_t row_products_launch(const T* a, const T* b, float* out, std::int64_t rows, std::int64_t columns,
                                cudaStream_t stream);

}  // namespace nemo_rl::kernels
