// The CUDA side of routing and of what surrounds the products of experts: tensors to launches.
#include "kernels/cuda/expert_launchers.h"
#include "ops/experts.h"
#include "ops/kernel_types.h"
#include "runtime/cuda_launch.h"

namespace nemo_rl::ops {
namespace {

kernels::CudaRoutes routes_of(const at::Tensor& logits, const at::Tensor& expert, const at::Tensor& weight,
                              const char* op) {
  NRL_CHECK_ARG(logits.scalar_type() == at::kFloat, op, " on CUDA: logits are ", c10::toString(logits.scalar_type()),
                "; expected float32");
  return {ptr<float>(logits), logits.size(1), expert.size(1), mutable_ptr<std::int64_t>(expert),
          mutable_ptr<float>(weight)};
}

void route_tokens_on_cuda(const at::Tensor& logits, bool renormalise, const at::Tensor& expert,
                          const at::Tensor& weight) {
  const runtime::CudaLaunch launch(logits, "route_tokens");
  launch.check(kernels::route_tokens_launch(routes_of(logits, expert, weight, launch.op), logits.size(0), nullptr,
                                            renormalise, launch.stream));
}

void route_tokens_backward_on_cuda(const at::Tensor& logits, bool renormalise, const at::Tensor& expert,
                                   const at::Tensor& weight, const at::Tensor& d_weight, const at::Tensor& d_logits) {
  const runtime::CudaLaunch launch(logits, "route_tokens_backward");
  launch.check(kernels::route_tokens_backward_launch(routes_of(logits, expert, weight, launch.op), logits.size(0),
                                                     nullptr, renormalise, ptr<float>(d_weight),
                                                     mutable_ptr<float>(d_logits), launch.stream));
}

void route_tokens_by_sigmoid_on_cuda(const at::Tensor& logits, const at::Tensor& bias, const SigmoidRouter& router,
                                     const at::Tensor& expert, const at::Tensor& weight) {
  const runtime::CudaLaunch launch(logits, "route_tokens_by_sigmoid");
  auto routes = routes_of(logits, expert, weight, launch.op);
  routes.value_stride = routes.E + router.groups;
  const auto values = launch.scratch(logits.size(0) * routes.value_stride, at::kFloat);
  routes.bias = ptr<float>(bias), routes.values = mutable_ptr<float>(values);
  launch.check(kernels::route_tokens_launch(routes, logits.size(0), &router, router.renormalise, launch.stream));
}

void route_tokens_by_sigmoid_backward_on_cuda(const at::Tensor& logits, const SigmoidRouter& router,
                                              const at::Tensor& expert, const at::Tensor& weight,
                                              const at::Tensor& d_weight, const at::Tensor& d_logits) {
  const runtime::CudaLaunch launch(logits, "route_tokens_by_sigmoid_backward");
  launch.check(kernels::route_tokens_backward_launch(routes_of(logits, expert, weight, launch.op), logits.size(0),
                                                     &router, router.renormalise, ptr<float>(d_weight),
                                                     mutable_ptr<float>(d_logits), launch.stream));
}

void add_up_experts_on_cuda(const at::Tensor& rows, const at::Tensor& row, const at::Tensor& weight, std::int64_t k,
                            const at::Tensor& y, bool accumulate) {
  const runtime::CudaLaunch launch(y, "add_up_experts");
  NRL_CHECK_ARG(y.scalar_type() == at::kFloat, launch.op, " on CUDA: sums are ", c10::toString(y.scalar_type()),
                "; expected float32");
  launch.check(kernels::add_up_experts_launch(
      {ptr<float>(rows), row.defined() ? ptr<std::int64_t>(row) : nullptr,
       weight.defined() ? ptr<float>(weight) : nullptr, k, y.size(0), y.size(1), mutable_ptr<float>(y), accumulate},
      launch.stream));
}

void row_products_on_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out) {
  const runtime::CudaLaunch launch(a, "row_products");
  runtime::dispatch_cuda(a.scalar_type(), launch.op, [&](auto tag) {
    using T = decltype(tag);
    launch.check(kernels::row_products_launch(ptr<T>(a), ptr<T>(b), mutable_ptr<float>(out), a.size(0), a.size(1),
                                              launch.stream));
  });
}

const bool registered = [] {
  route_tokens_cuda.set(route_tokens_on_cuda);
  route_tokens_backward_cuda.set(route_tokens_backward_on_cuda);
  route_tokens_by_sigmoid_cuda.set(route_tokens_by_sigmoid_on_cuda);
  route_tokens_by_sigmoid_backward_cuda.set(route_tokens_by_sigmoid_backward_on_cuda);
  add_up_experts_cuda.set(add_up_experts_on_cuda);
  row_products_cuda.set(row_products_on_cuda);
  return true;
}();

}  // namespace
}  // namespace nemo_rl::ops
