// Argument checks and conversions that the ops share.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>

#include "common/check.h"

namespace nemo_rl::ops {

/// `t` as [rows, cols] of `like`'s dtype and device with unit stride along a row (copied only if it has to be).
at::Tensor as_matrix(const at::Tensor& t, const at::Tensor& like, std::int64_t rows, std::int64_t cols,
                     const char* name);

/// `t` as a contiguous [size] vector of `like`'s dtype and device.
at::Tensor as_vector(const at::Tensor& t, const at::Tensor& like, std::int64_t size, const char* name);

/// float32 or float64, the two types the losses and estimators compute in.
void check_real(const at::Tensor& t, const char* name);

/// Rows a task: about 16k elements, whatever the number of threads.
std::int64_t row_grain(std::int64_t row_length);

}  // namespace nemo_rl::ops
