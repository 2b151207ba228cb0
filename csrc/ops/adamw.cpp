#include "ops/adamw.h"

#include <ATen/Parallel.h>

#include <cmath>

#include "ops/adamw_arguments.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

runtime::CudaSlot<AdamWLauncher> adamw_step_cuda("adamw_step");
runtime::CudaSlot<at::Tensor(const at::Tensor&)> block_squares_cuda("block_squares");

namespace {

constexpr std::int64_t kBlock = kFlatBlock;
constexpr std::int64_t kSplitAtOnce = 1 << 24;

template <class A, class M, class V>
void step_flat(kernels::AdamW<A, M, V>* kernel, const AdamWBuffers& b, const AdamWSettings& s, std::int64_t step,
               double grad_scale) {
  const auto args = adamw_arguments<A, M, V>(b, s, step, grad_scale);
  const std::int64_t n = b.weights.numel();
  at::parallel_for(0, (n + kBlock - 1) / kBlock, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) kernel(args, i * kBlock, std::min(n, (i + 1) * kBlock));
  });
}

}  // namespace

void adamw_step(const AdamWBuffers& b, const AdamWSettings& settings, std::int64_t step, double grad_scale) {
  const std::int64_t n = b.weights.numel();
  NRL_CHECK(b.grads.numel() == n && b.exp_avg.numel() == n && b.exp_avg_sq.numel() == n &&
                (!b.compute || b.compute->numel() == n) && (!b.remainders || b.remainders->numel() == n),
            "adamw_step: buffers of different length");
  if (b.weights.is_cuda()) return adamw_step_cuda.get(b.weights)(b, settings, step, grad_scale);
  const auto run = [&](auto* kernel) { step_flat(kernel, b, settings, step, grad_scale); };
  if (b.weights.scalar_type() == at::kDouble) return run(kernels::adamw_f64);
  NRL_CHECK_ARG(b.weights.scalar_type() == (b.remainders ? at::kBFloat16 : at::kFloat),
                "adamw_step: weights must be float32 or float64, or bfloat16 with remainders");
  NRL_CHECK_ARG((b.exp_avg.scalar_type() == at::kByte) == (b.exp_avg_sq.scalar_type() == at::kByte),
                "adamw_step: both moments are uint8, or none");
  if (b.exp_avg.scalar_type() == at::kByte) return run(kernels::adamw_f32_u8_u8);
  const bool short_first = b.exp_avg.scalar_type() == at::kBFloat16;
  const bool short_second = b.exp_avg_sq.scalar_type() == at::kBFloat16;
  if (short_first) return short_second ? run(kernels::adamw_f32_bf16_bf16) : run(kernels::adamw_f32_bf16_f32);
  return short_second ? run(kernels::adamw_f32_f32_bf16) : run(kernels::adamw_f32);
}

at::Tensor block_squares(const at::Tensor& x) {
  if (x.is_cuda()) return block_squares_cuda.get(x)(x);
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

double l2_norm(const at::Tensor& x) { return norm_of_blocks(block_squares(x)); }

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

void split_weights(const at::Tensor& weights, const at::Tensor& compute, const at::Tensor& remainders) {
  const auto halves = [](const at::Tensor& bits) { return bits.view(at::kShort).view({-1, 2}); };
  for (std::int64_t i = 0, n = weights.numel(); i < n; i += kSplitAtOnce) {
    const auto part = [=](const at::Tensor& t) { return t.narrow(0, i, std::min(kSplitAtOnce, n - i)); };
    const auto bits = part(weights).view(at::kInt);
    part(remainders).copy_(halves(bits).select(1, 0));
    part(compute).view(at::kShort).copy_(halves(bits.add(0x8000)).select(1, 1));
  }
}

}  // namespace nemo_rl::ops
