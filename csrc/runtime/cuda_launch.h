// What the CUDA sides of the ops share: the stream, the check of a launch, small arrays on their way to the device,
// dtype switches. For csrc/ops/*_cuda.cpp only.
#pragma once
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "common/bfloat16.h"
#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::runtime {

/// This op's device is the current one while it lives; `stream` is torch's current stream there.
struct CudaLaunch {
  CudaLaunch(const at::Tensor& t, const char* op)
      : guard(t.device()), stream(c10::cuda::getCurrentCUDAStream().stream()), like(t), op(op) {}
  /// Throws unless the launch succeeded, with op, shape and device.
  void check(cudaError_t status) const {
    NRL_CHECK(status == cudaSuccess, op, " on ", like.sizes(), " ", c10::toString(like.scalar_type()), " failed on ",
              like.device().str(), ": ", cudaGetErrorString(status));
  }
  /// Uninitialised memory of this device, for the work of this stream.
  at::Tensor scratch(std::int64_t n, at::ScalarType dtype) const { return at::empty({n}, like.options().dtype(dtype)); }

  c10::cuda::CUDAGuard guard;
  cudaStream_t stream;
  const at::Tensor& like;
  const char* op;
};

/// A host array of plain values on the device of `like`. The copy is over when this returns, so the source may go.
template <class T>
at::Tensor to_device(const std::vector<T>& values, const at::Tensor& like) {
  const auto bytes = static_cast<std::int64_t>(values.size() * sizeof(T));
  const auto host = at::from_blob(const_cast<T*>(values.data()), {bytes}, at::kByte);  // only read
  return host.to(like.device());
}

/// The last array that was uploaded: layers of one forward ask for the same one, and then it is there already.
template <class T>
class UploadedArray {
 public:
  const at::Tensor& get(const std::vector<T>& values, const at::Tensor& like) {
    const bool same = device_.defined() && device_.device() == like.device() && values.size() == host_.size() &&
                      std::memcmp(values.data(), host_.data(), values.size() * sizeof(T)) == 0;
    if (!same) {
      device_ = to_device(values, like);
      host_ = values;
    }
    return device_;
  }

 private:
  std::vector<T> host_;
  at::Tensor device_;
};

/// Calls f with a value of the kernel type of `dtype`, float or bfloat16.
template <class F>
decltype(auto) dispatch_cuda(at::ScalarType dtype, const char* op, F&& f) {
  switch (dtype) {
    case at::kFloat:
      return f(float{});
    case at::kBFloat16:
      return f(bfloat16{});
    default:
      break;
  }
  throw ArgumentError(
      detail::concat(op, ": dtype ", c10::toString(dtype),
                     " is not float32 or bfloat16, the types of the CUDA kernels; use policy.precision=float32 or "
                     "bfloat16, or the CPU"));
}

}  // namespace nemo_rl::runtime
