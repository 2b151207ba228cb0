#include "ops/checks.h"

#include "runtime/tensor.h"

namespace nemo_rl::ops {

void check_real(const at::Tensor& t, const char* name) {
  NRL_CHECK_ARG(t.defined(), name, " is missing");
  NRL_CHECK_ARG(t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble, name, " has dtype ", t.scalar_type(),
                "; expected float32 or float64");
}

at::Tensor as_matrix(const at::Tensor& t, const at::Tensor& like, std::int64_t rows, std::int64_t cols,
                     const char* name) {
  NRL_CHECK_ARG(t.defined(), name, " is missing");
  NRL_CHECK_ARG(t.dim() == 2 && t.size(0) == rows && t.size(1) == cols, name, " has shape ", t.sizes(), "; expected [",
                rows, ", ", cols, "]");
  NRL_CHECK_ARG(t.device() == like.device(), name, " is on ", t.device(), "; expected ", like.device());
  at::Tensor out = t.scalar_type() == like.scalar_type() ? t.detach() : t.detach().to(like.scalar_type());
  return out.stride(1) == 1 || cols <= 1 ? out : out.contiguous();
}

at::Tensor as_vector(const at::Tensor& t, const at::Tensor& like, std::int64_t size, const char* name) {
  NRL_CHECK_ARG(t.defined(), name, " is missing");
  NRL_CHECK_ARG(t.numel() == size && t.dim() >= 1, name, " has shape ", t.sizes(), "; expected [", size, "]");
  NRL_CHECK_ARG(t.device() == like.device(), name, " is on ", t.device(), "; expected ", like.device());
  return t.detach().to(like.scalar_type()).reshape({size}).contiguous();
}

std::int64_t row_grain(std::int64_t row_length) {
  return std::max<std::int64_t>(1, 16384 / std::max<std::int64_t>(1, row_length));
}

}  // namespace nemo_rl::ops
