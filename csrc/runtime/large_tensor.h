// Tensors that live long and are large: weights, gradients, optimizer state, activations, cache.
#pragma once
#include <ATen/core/Tensor.h>

namespace nemo_rl::runtime {

/// Uninitialised memory; on the CPU in huge pages (common/large_memory.h) as far as its first `used` bytes reach, all
/// of it by default.
at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options, std::int64_t used = -1);

/// The same, zero.
at::Tensor zeros_large(at::IntArrayRef sizes, const at::TensorOptions& options);

/// Clears a contiguous tensor. Each thread clears one long range: there memset does not read memory before it writes,
/// while the stores of zero_ do.
void clear(const at::Tensor& tensor);

/// The same, and the system gets the memory back until it is written again (Linux; elsewhere it is only cleared). For a
/// contiguous tensor on the CPU.
void give_up(const at::Tensor& tensor);

}  // namespace nemo_rl::runtime
