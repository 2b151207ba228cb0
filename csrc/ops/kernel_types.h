// at::Tensor to the torch-free kernels' pointers, and the dtype switch that every op uses.
#pragma once
#include <ATen/core/Tensor.h>

#include "common/bfloat16.h"
#include "common/check.h"

namespace nemo_rl::ops {

template <class T>
const T* ptr(const at::Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* mutable_ptr(const at::Tensor& t) {
  return static_cast<T*>(t.data_ptr());
}

/// Calls f with a value of the kernel type of `dtype`: float, double or bfloat16.
template <class F>
decltype(auto) dispatch_floating(at::ScalarType dtype, const char* op, F&& f) {
  switch (dtype) {
    case at::kFloat:
      return f(float{});
    case at::kDouble:
      return f(double{});
    case at::kBFloat16:
      return f(bfloat16{});
    default:
      break;
  }
  throw ArgumentError(detail::concat(op, ": dtype ", c10::toString(dtype), " is not float32, bfloat16 or float64"));
}

}  // namespace nemo_rl::ops
