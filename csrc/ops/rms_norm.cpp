#include "ops/rms_norm.h"

#include <ATen/Parallel.h>

#include "kernels/rms_norm.h"
#include "ops/kernel_types.h"
#include "runtime/parallel_items.h"
#include "runtime/tensor.h"

namespace nemo_rl::ops {

runtime::CudaSlot<RmsNormForwardLauncher> rms_norm_forward_cuda("rms_norm_forward");
runtime::CudaSlot<RmsNormBackwardLauncher> rms_norm_backward_cuda("rms_norm_backward");

namespace {

constexpr std::int64_t kRowBlock = 64;  // rows whose share of dw is summed at once

template <class X, class T>
void forward(kernels::RmsNormForward<X, T>* kernel, const at::Tensor& x, const at::Tensor& w, double eps, double offset,
             const at::Tensor& y, const std::optional<at::Tensor>& rstd) {
  using A = accumulate_t<T>;
  const std::int64_t D = w.numel(), inner = x.size(1) / D;
  const kernels::RmsNormForwardArgs<X, T> args{
      ptr<X>(x), x.stride(0), ptr<T>(w), mutable_ptr<T>(y), y.stride(0), rstd ? mutable_ptr<A>(*rstd) : nullptr, inner,
      D,         eps,         offset};
  runtime::parallel_rows(x.size(0), std::max<std::int64_t>(1, 16384 / (inner * D)),
                         [&](std::int64_t begin, std::int64_t end) { kernel(args, begin, end); });
}

template <class X, class G, class T>
void backward(kernels::RmsNormBackward<X, G, T>* kernel, const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w,
              double offset, const at::Tensor& rstd, const at::Tensor& dx, bool accumulate, const at::Tensor& dw) {
  using A = accumulate_t<T>;
  const std::int64_t D = w.numel(), rows = x.size(0), blocks = (rows + kRowBlock - 1) / kRowBlock;
  const kernels::RmsNormBackwardArgs<X, G, T> args{
      ptr<G>(dy),         dy.stride(0), ptr<X>(x),  x.stride(0),   ptr<T>(w), ptr<A>(rstd),
      mutable_ptr<X>(dx), dx.stride(0), accumulate, x.size(1) / D, D,         offset};
  std::vector<A> parts(static_cast<std::size_t>(blocks * D));
  at::parallel_for(0, blocks, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t b = begin; b < end; ++b)
      kernel(args, b * kRowBlock, std::min(rows, (b + 1) * kRowBlock), parts.data() + b * D);
  });
  if (!dw.defined()) return;
  A* sum = mutable_ptr<A>(dw);
  for (std::int64_t b = 0; b < blocks; ++b)
    for (std::int64_t d = 0; d < D; ++d) sum[d] += parts[static_cast<std::size_t>(b * D + d)];
}

void check(const at::Tensor& x, const at::Tensor& w, const at::Tensor& y) {
  NRL_CHECK_ARG(x.dim() == 2 && x.stride(1) == 1 && y.dim() == 2 && y.stride(1) == 1 && x.sizes() == y.sizes() &&
                    w.is_contiguous() && x.size(1) % w.numel() == 0,
                "rms_norm: x ", x.sizes(), ", y ", y.sizes(), " and weight ", w.sizes(), " do not match");
}

}  // namespace

void rms_norm_forward(const at::Tensor& x, const at::Tensor& w, double eps, double offset, const at::Tensor& y,
                      const std::optional<at::Tensor>& rstd) {
  check(x, w, y);
  if (x.is_cuda()) return rms_norm_forward_cuda.get(x)(x, w, eps, offset, y, rstd);
  const auto in = x.scalar_type(), type = w.scalar_type();
  if (type == at::kFloat && in == at::kFloat)
    return forward<float, float>(kernels::rms_norm_forward_f32, x, w, eps, offset, y, rstd);
  if (type == at::kDouble && in == at::kDouble)
    return forward<double, double>(kernels::rms_norm_forward_f64, x, w, eps, offset, y, rstd);
  if (type == at::kBFloat16 && in == at::kFloat)
    return forward<float, bfloat16>(kernels::rms_norm_forward_f32_bf16, x, w, eps, offset, y, rstd);
  if (type == at::kBFloat16 && in == at::kBFloat16)
    return forward<bfloat16, bfloat16>(kernels::rms_norm_forward_bf16, x, w, eps, offset, y, rstd);
  throw ArgumentError(detail::concat("rms_norm: x in ", c10::toString(in), " with a weight in ", c10::toString(type)));
}

void rms_norm_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& w, double offset,
                       const at::Tensor& rstd, const at::Tensor& dx, bool accumulate, const at::Tensor& dw) {
  check(x, w, dx);
  if (x.is_cuda())
    return rms_norm_backward_cuda.get(x)(dy, x, w, offset, rstd, dx, accumulate,
                                         dw.defined() ? dw : at::zeros({w.numel()}, w.options().dtype(at::kFloat)));
  const auto in = x.scalar_type(), type = w.scalar_type(), grad = dy.scalar_type();
  if (type == at::kFloat && in == at::kFloat && grad == at::kFloat)
    return backward<float, float, float>(kernels::rms_norm_backward_f32, dy, x, w, offset, rstd, dx, accumulate, dw);
  if (type == at::kDouble && in == at::kDouble && grad == at::kDouble)
    return backward<double, double, double>(kernels::rms_norm_backward_f64, dy, x, w, offset, rstd, dx, accumulate, dw);
  if (type == at::kBFloat16 && in == at::kFloat && grad == at::kFloat)
    return backward<float, float, bfloat16>(kernels::rms_norm_backward_f32_bf16, dy, x, w, offset, rstd, dx, accumulate,
                                            dw);
  if (type == at::kBFloat16 && in == at::kBFloat16 && grad == at::kBFloat16)
    return backward<bfloat16, bfloat16, bfloat16>(kernels::rms_norm_backward_bf16, dy, x, w, offset, rstd, dx,
                                                  accumulate, dw);
  throw ArgumentError(detail::concat("rms_norm_backward: x in ", c10::toString(in), ", weight in ", c10::toString(type),
                                     ", gradient in ", c10::toString(grad)));
}

}  // namespace nemo_rl::ops
