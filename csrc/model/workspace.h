// Buffers that are used again: glibc gives large blocks back to the system, so a fresh tensor a step would cost a page
// fault for every 4 KiB of it.
#pragma once
#include <ATen/ATen.h>

#include <map>
#include <string>
#include <vector>

#include "ops/large_tensor.h"

namespace nemo_rl::model {

class Workspace {
 public:
  explicit Workspace(at::Device device = at::kCPU) : device_(device) {}
  at::Device device() const { return device_; }

  /// A tensor of this shape and dtype under `name`; contents are undefined. A second call with the same name may return
  /// the same memory, whatever the shape.
  at::Tensor take(const std::string& name, at::IntArrayRef shape, at::ScalarType dtype) {
    std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(dtype));
    for (auto n : shape) bytes *= n;
    auto& buffer = buffers_[name];
    if (!buffer.defined() || buffer.numel() < bytes) buffer = ops::empty_large({bytes + bytes / 8 + 64}, at::TensorOptions().dtype(at::kByte).device(device_), bytes);
    return buffer.narrow(0, 0, bytes).view(dtype).view(shape);
  }
  void clear() { buffers_.clear(); }
  /// Where the buffers lie.
  std::vector<const void*> places() const {
    std::vector<const void*> all;
    for (const auto& [name, buffer] : buffers_) all.push_back(buffer.const_data_ptr());
    return all;
  }
  std::int64_t bytes() const {
    std::int64_t sum = 0;
    for (const auto& [name, buffer] : buffers_) sum += buffer.numel();
    return sum;
  }

 private:
  at::Device device_;
  std::map<std::string, at::Tensor> buffers_;
};

}  // namespace nemo_rl::model
