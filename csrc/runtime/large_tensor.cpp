#include "runtime/large_tensor.h"

#include <ATen/Parallel.h>

#include <cstring>

#include "common/check.h"
#include "common/large_memory.h"
#include "runtime/tensor.h"

namespace nemo_rl::runtime {

at::Tensor empty_large(at::IntArrayRef sizes, const at::TensorOptions& options, std::int64_t used) {
  const auto bytes = static_cast<std::size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  if (!options.device().is_cpu() || bytes < kHugePage) return at::empty(sizes, options);
  LargeBlock block = allocate_large(bytes, used < 0 ? bytes : static_cast<std::size_t>(used));
  const FreeLarge free = block.get_deleter();
  return at::from_blob(block.release(), sizes, free, options);
}

at::Tensor zeros_large(at::IntArrayRef sizes, const at::TensorOptions& options) {
  auto tensor = empty_large(sizes, options);
  clear(tensor);
  return tensor;
}

void clear(const at::Tensor& tensor) {
  NRL_CHECK(tensor.is_contiguous(), "clear: a contiguous tensor was expected, got strides ", tensor.strides());
  if (!tensor.is_cpu()) {
    tensor.zero_();
    return;
  }
  auto* const at = static_cast<std::byte*>(tensor.mutable_data_ptr());
  constexpr std::int64_t kStretch = 1 << 20;
  at::parallel_for(0, static_cast<std::int64_t>(tensor.nbytes()), kStretch, [at](std::int64_t begin, std::int64_t end) {
    std::memset(at + begin, 0, static_cast<std::size_t>(end - begin));
  });
}

void give_up(const at::Tensor& tensor) {
  NRL_CHECK(tensor.is_cpu() && tensor.is_contiguous(),
            "give_up: a contiguous tensor on the CPU was expected, got one on ", tensor.device().str());
  auto* const begin = static_cast<std::byte*>(tensor.mutable_data_ptr());
  give_up_memory(begin, tensor.nbytes());
}

}  // namespace nemo_rl::runtime
