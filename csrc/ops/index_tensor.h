// Numbers of rows as a tensor, for ATen's own gathers.
#pragma once
#include <cstdint>

#include "runtime/tensor.h"

namespace nemo_rl::ops {

/// values[0, n) on the device of `like`. On the CPU it is a view: only to be read, and only while the values live.
inline at::Tensor index_tensor(const std::int64_t* values, std::int64_t n, const at::Tensor& like) {
  return at::from_blob(const_cast<std::int64_t*>(values), {n}, at::kLong).to(like.device());
}

}  // namespace nemo_rl::ops
