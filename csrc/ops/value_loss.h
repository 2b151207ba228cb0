// The value model's loss on tensors. Formulas: kernels/value_loss.h.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "kernels/value_loss.h"
#include "runtime/cuda_dispatch.h"

namespace nemo_rl::ops {

using kernels::ValueLossConfig;

struct ValueLossResult {
  at::Tensor loss;         ///< scalar of the predictions' dtype
  at::Tensor grad_values;  ///< [B, S]
  at::Tensor metrics;      ///< float64 [kNumValueMetrics]; names from value_loss_metric_names
};

/// values, returns, old_values (undefined without a cliprange) and token_mask [B, S], sample_mask [B];
/// global_valid_toks a scalar, or undefined: the batch's own sum of token_mask * sample_mask.
ValueLossResult mse_value_loss(const at::Tensor& values, const at::Tensor& returns, const at::Tensor& old_values,
                               const at::Tensor& token_mask, const at::Tensor& sample_mask,
                               const at::Tensor& global_valid_toks, const ValueLossConfig& config);

const std::vector<std::string>& value_loss_metric_names();

template <class T>
using ValueLossLauncher = void(const kernels::ValueLossArgs<T>&, const ValueLossConfig&, double* rows, double* metrics);
extern runtime::CudaSlot<ValueLossLauncher<float>> value_loss_cuda_f32;
extern runtime::CudaSlot<ValueLossLauncher<double>> value_loss_cuda_f64;

}  // namespace nemo_rl::ops
