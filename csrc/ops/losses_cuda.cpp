// Puts the CUDA launchers of losses and advantage estimators into the ops' slots when the module _cuda is loaded.
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "kernels/cuda/launchers.h"
#include "ops/advantages.h"
#include "ops/clipped_pg_loss.h"
#include "ops/value_loss.h"

namespace nemo_rl::ops {
namespace {

cudaStream_t stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

/// An error of a launch, with the op, its shape and its device.
void check_launch(cudaError_t status, const char* op, std::int64_t rows, std::int64_t columns) {
  NRL_CHECK(status == cudaSuccess, op, " on [", rows, ", ", columns,
            "] failed to launch on cuda:", static_cast<int>(c10::cuda::current_device()), ": ",
            cudaGetErrorString(status));
}

template <class T>
void clipped_pg_loss_on_cuda(const kernels::ClippedPGArgs<T>& a, const ClippedPGConfig& c, double* rows,
                             double* metrics) {
  check_launch(kernels::clipped_pg_loss_launch(a, c, rows, metrics, stream()), "clipped_pg_loss", a.num_rows,
               a.num_tokens);
}

template <class T>
void value_loss_on_cuda(const kernels::ValueLossArgs<T>& a, const ValueLossConfig& c, double* rows, double* metrics) {
  check_launch(kernels::value_loss_launch(a, c, rows, metrics, stream()), "mse_value_loss", a.num_rows, a.num_tokens);
}

template <class T>
void gae_on_cuda(const kernels::GaeArgs<T>& a, const GaeConfig& c) {
  check_launch(kernels::gae_launch(a, c, stream()), "gae", a.num_rows, a.num_tokens);
}

template <class T>
void token_advantages_on_cuda(const kernels::TokenAdvantageArgs<T>& a) {
  check_launch(kernels::token_advantages_launch(a, stream()), "reinforce_plus_plus", a.num_rows, a.num_tokens);
}

template <class T>
void whiten_on_cuda(const kernels::MaskedArgs<T>& a, kernels::WhitenRule rule, bool zero_masked, kernels::Moments* rows,
                    kernels::WhitenScale* scale) {
  check_launch(kernels::whiten_launch(a, rule, zero_masked, rows, scale, stream()), "whiten", a.num_rows, a.num_tokens);
}

const bool registered = [] {
  clipped_pg_loss_cuda_f32.set(clipped_pg_loss_on_cuda<float>);
  clipped_pg_loss_cuda_f64.set(clipped_pg_loss_on_cuda<double>);
  value_loss_cuda_f32.set(value_loss_on_cuda<float>);
  value_loss_cuda_f64.set(value_loss_on_cuda<double>);
  gae_cuda_f32.set(gae_on_cuda<float>);
  gae_cuda_f64.set(gae_on_cuda<double>);
  token_advantages_cuda_f32.set(token_advantages_on_cuda<float>);
  token_advantages_cuda_f64.set(token_advantages_on_cuda<double>);
  whiten_cuda_f32.set(whiten_on_cuda<float>);
  whiten_cuda_f64.set(whiten_on_cuda<double>);
  return true;
}();

}  // namespace
}  // namespace nemo_rl::ops
