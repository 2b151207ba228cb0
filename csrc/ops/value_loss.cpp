#include "ops/value_loss.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include "ops/checks.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

runtime::CudaSlot<ValueLossLauncher<float>> value_loss_cuda_f32("mse_value_loss");
runtime::CudaSlot<ValueLossLauncher<double>> value_loss_cuda_f64("mse_value_loss");

const std::vector<std::string>& value_loss_metric_names() {
  static const std::vector<std::string> names = {
      "loss",       "vf_clipfrac",     "returns_mean",     "values_mean",      "values_min",
      "values_max", "returns_sq_mean", "residual_sq_mean", "nonfinite_sample", "nonfinite_token"};
  NRL_CHECK(names.size() == kernels::kNumValueMetrics, "one name a metric");
  return names;
}

namespace {

template <class T, class Slot>
void run(const kernels::ValueLossArgs<T>& a, const ValueLossConfig& c, kernels::ValueLossKernel<T>* kernel,
         const Slot& cuda, const at::Tensor& values, double* rows, double* metrics) {
  if (values.is_cuda()) return cuda.get(values)(a, c, rows, metrics);
  at::parallel_for(0, a.num_rows, row_grain(a.num_tokens),
                   [&](std::int64_t begin, std::int64_t end) { kernel(a, c, begin, end, rows); });
  double merged[kernels::kValueRowSize];
  for (int i = 0; i < kernels::kValueRowSize; ++i) {
    const kernels::RowMerge how = kernels::value_loss_merge(i);
    merged[i] = kernels::merge_identity(how);
    for (std::int64_t b = 0; b < a.num_rows; ++b)
      merged[i] = kernels::merge_rows(how, merged[i], rows[b * kernels::kValueRowSize + i]);
  }
  kernels::value_loss_finalize<T>(merged, a.num_tokens, c, *a.global_valid_toks, metrics);
}

}  // namespace

ValueLossResult mse_value_loss(const at::Tensor& values, const at::Tensor& returns, const at::Tensor& old_values,
                               const at::Tensor& token_mask, const at::Tensor& sample_mask,
                               const at::Tensor& global_valid_toks, const ValueLossConfig& config) {
  check_real(values, "values");
  NRL_CHECK_ARG(values.dim() == 2, "values has shape ", values.sizes(), "; expected [B, S]");
  const std::int64_t B = values.size(0), S = values.size(1);
  const at::Tensor v = as_matrix(values, values, B, S, "values");
  const at::Tensor target = as_matrix(returns, v, B, S, "returns");
  const at::Tensor old = config.cliprange > 0 ? as_matrix(old_values, v, B, S, "old values") : at::Tensor();
  const at::Tensor mask = as_matrix(token_mask, v, B, S, "token_mask");
  const at::Tensor sample = as_vector(sample_mask, v, B, "sample_mask");
  NRL_CHECK_ARG(!global_valid_toks.defined() || global_valid_toks.numel() == 1, "global_valid_toks has shape ",
                global_valid_toks.sizes(), "; expected one number");
  const at::Tensor toks =
      (global_valid_toks.defined() ? global_valid_toks.detach().reshape({}).to(v.device(), at::kDouble)
                                   : (mask.sum(1, false, at::kDouble) * sample.to(at::kDouble)).sum())
          .contiguous();
  ValueLossResult out;
  out.grad_values = at::empty({B, S}, v.options());
  out.metrics = at::empty({kernels::kNumValueMetrics}, v.options().dtype(at::kDouble));
  const at::Tensor rows = at::empty({B, kernels::kValueRowSize}, v.options().dtype(at::kDouble));
  const auto launch = [&]<class T>(T, auto* kernel, const auto& cuda) {
    kernels::ValueLossArgs<T> a;
    a.num_rows = B;
    a.num_tokens = S;
    a.values = {v.const_data_ptr<T>(), v.stride(0)};
    a.returns = {target.const_data_ptr<T>(), target.stride(0)};
    if (old.defined()) a.old_values = {old.const_data_ptr<T>(), old.stride(0)};
    a.token_mask = {mask.const_data_ptr<T>(), mask.stride(0)};
    a.sample_mask = sample.const_data_ptr<T>();
    a.global_valid_toks = toks.const_data_ptr<double>();
    a.grad = out.grad_values.mutable_data_ptr<T>();
    run<T>(a, config, kernel, cuda, v, rows.mutable_data_ptr<double>(), out.metrics.mutable_data_ptr<double>());
  };
  if (v.scalar_type() == at::kFloat) launch(float{}, kernels::value_loss_f32, value_loss_cuda_f32);
  else launch(double{}, kernels::value_loss_f64, value_loss_cuda_f64);
  out.loss = out.metrics.select(0, kernels::kValueLoss).to(v.scalar_type());
  return out;
}

}  // namespace nemo_rl::ops
