#include "ops/adamw.h"

#include <ATen/Parallel.h>

#include <cmath>

#include "kernels/adamw.h"
#include "ops/kernel_types.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

runtime::CudaSlot<AdamWLauncher> adamw_step_cuda("adamw_step");
runtime::CudaSlot<double(const at::Tensor&)> l2_norm_cuda("l2_norm");

namespace {

constexpr std::int64_t kBlock = kFlatBlock;

template <class A>
void step_flat(kernels::AdamW<A>* kernel, const kernels::AdamWArgs<A>& args, std::int64_t n) {
  at::parallel_for(0, (n + kBlock - 1) / kBlock, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) kernel(args, b * kBlock, std::min(n, (b + 1) * kBlock));
  });
}

template <class A>
kernels::AdamWArgs<A> arguments(const at::Tensor& weights, const at::Tensor& grads, const at::Tensor& exp_avg,
                                const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& compute,
                                const AdamWSettings& s, std::int64_t step, double grad_scale) {
  return {mutable_ptr<A>(weights),
          ptr<A>(grads),
          mutable_ptr<A>(exp_avg),
          mutable_ptr<A>(exp_avg_sq),
          compute ? mutable_ptr<bfloat16>(*compute) : nullptr,
          s.lr,
          s.beta1,
          s.beta2,
          s.eps,
          s.weight_decay,
          1.0 - std::pow(s.beta1, static_cast<double>(step)),
          1.0 - std::pow(s.beta2, static_cast<double>(step)),
          grad_scale};
}

}  // namespace

void adamw_step(const at::Tensor& weights, const at::Tensor& grads, const at::Tensor& exp_avg,
                const at::Tensor& exp_avg_sq, const std::optional<at::Tensor>& compute, const AdamWSettings& settings,
                std::int64_t step, double grad_scale) {
  const std::int64_t n = weights.numel();
  NRL_CHECK(
      grads.numel() == n && exp_avg.numel() == n && exp_avg_sq.numel() == n && (!compute || compute->numel() == n),
      "adamw_step: buffers of different length");
  if (weights.is_cuda())
    return adamw_step_cuda.get(weights)(weights, grads, exp_avg, exp_avg_sq, compute, settings, step, grad_scale);
  if (weights.scalar_type() == at::kDouble) {
    step_flat(kernels::adamw_f64,
              arguments<double>(weights, grads, exp_avg, exp_avg_sq, compute, settings, step, grad_scale), n);
  } else {
    NRL_CHECK_ARG(weights.scalar_type() == at::kFloat, "adamw_step: weights must be float32 or float64");
    step_flat(kernels::adamw_f32,
              arguments<float>(weights, grads, exp_avg, exp_avg_sq, compute, settings, step, grad_scale), n);
  }
}

at::Tensor block_squares(const at::Tensor& x) {
  const std::int64_t n = x.numel(), blocks = (n + kBlock - 1) / kBlock;
  const auto squares = at::empty({blocks}, at::kDouble);
  double* const parts = mutable_ptr<double>(squares);
  at::parallel_for(0, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b) {
      const std::int64_t count = std::min(kBlock, n - b * kBlock);
      parts[b] = x.scalar_type() == at::kDouble ? kernels::sum_of_squares_f64(ptr<double>(x) + b * kBlock, count)
                                                : kernels::sum_of_squares_f32(ptr<float>(x) + b * kBlock, count);
    }
  });
  return squares;
}

double norm_of_blocks(const at::Tensor& squares) {
  const double* const parts = ptr<double>(squares);
  double sum = 0;
  for (std::int64_t b = 0; b < squares.numel(); ++b) sum += parts[b];
  return std::sqrt(sum);
}

double l2_norm(const at::Tensor& x) { return x.is_cuda() ? l2_norm_cuda.get(x)(x) : norm_of_blocks(block_squares(x)); }

void round_weights(const at::Tensor& weights, const at::Tensor& compute) {
  NRL_CHECK(weights.numel() == compute.numel() && weights.scalar_type() == at::kFloat &&
                compute.scalar_type() == at::kBFloat16,
            "round_weights: float32 to bfloat16 of the same length");
  if (weights.is_cuda()) {
    compute.copy_(weights);
    return;
  }
  const float* const from = ptr<float>(weights);
  bfloat16* const to = mutable_ptr<bfloat16>(compute);
  at::parallel_for(0, weights.numel(), kBlock, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) to[i] = bfloat16(from[i]);
  });
}

}  // namespace nemo_rl::ops
