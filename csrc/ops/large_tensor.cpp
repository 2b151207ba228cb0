#include "ops/large_tensor.h"

#include <ATen/ATen.h>

#include <new>

#include "common/large_memory.h"

namespace nemo_rl::ops {

at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options, std::int64_t used) {
  const auto bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  if (!options.device().is_cpu() || bytes < kHugePage) return at::empty(sizes, options);
  constexpr auto alignment = std::align_val_t{kHugePage};
  void* const memory = ::operator new(bytes, alignment);
  advise_huge_pages(memory, used < 0 ? bytes : static_cast<std::size_t>(used));
  return at::from_blob(memory, sizes, [](void* p) { ::operator delete(p, alignment); }, options);
}

at::Tensor zeros_large(at::IntArrayRef sizes, const at::TensorOptions& options) { return empty_large(sizes, options).zero_(); }

}  // namespace nemo_rl::ops
