#include "ops/large_tensor.h"

#include <ATen/ATen.h>

#include "common/large_memory.h"

namespace nemo_rl::ops {

at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options, std::int64_t used) {
  const auto bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  if (!options.device().is_cpu() || bytes < kHugePage) return at::empty(sizes, options);
  LargeBlock block = allocate_large(bytes, used < 0 ? bytes : static_cast<std::size_t>(used));
  const FreeLarge free = block.get_deleter();
  return at::from_blob(block.release(), sizes, free, options);
}

at::Tensor zeros_large(at::IntArrayRef sizes, const at::TensorOptions& options) { return empty_large(sizes, options).zero_(); }

}  // namespace nemo_rl::ops
