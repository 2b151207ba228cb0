#include "ops/rope.h"

#include "kernels/rope.h"
#include "ops/kernel_types.h"
#include "runtime/parallel_items.h"

namespace nemo_rl::ops {

runtime::CudaSlot<RopeLauncher> rope_cuda("rope");

void rope(const at::Tensor& x, std::int64_t heads, std::int64_t H, const at::Tensor& positions, const at::Tensor& cos,
          const at::Tensor& sin, bool inverse, bool interleaved) {
  NRL_CHECK_ARG(x.dim() == 2 && x.stride(1) == 1 && x.size(1) >= (heads - 1) * H + 2 * cos.size(1) &&
                    positions.numel() == x.size(0) && 2 * cos.size(1) <= H && cos.is_contiguous() &&
                    sin.is_contiguous(),
                "rope: x ", x.sizes(), " with ", heads, " heads of ", H, ", positions ", positions.sizes(), ", table ",
                cos.sizes());
  if (x.is_cuda()) return rope_cuda.get(x)(x, heads, H, positions, cos, sin, inverse, interleaved);
  dispatch_floating(x.scalar_type(), "rope", [&](auto tag) {
    using T = decltype(tag);
    const kernels::RopeArgs<T> args{mutable_ptr<T>(x),
                                    x.stride(0),
                                    ptr<std::int64_t>(positions),
                                    ptr<float>(cos),
                                    ptr<float>(sin),
                                    heads,
                                    H,
                                    2 * cos.size(1),
                                    inverse,
                                    interleaved};
    runtime::parallel_rows(x.size(0), std::max<std::int64_t>(1, 8192 / (heads * H)),
                           [&](std::int64_t begin, std::int64_t end) {
                             if constexpr (std::is_same_v<T, float>) kernels::rope_f32(args, begin, end);
                             if constexpr (std::is_same_v<T, double>) kernels::rope_f64(args, begin, end);
                             if constexpr (std::is_same_v<T, bfloat16>) kernels::rope_bf16(args, begin, end);
                           });
  });
}

}  // namespace nemo_rl::ops
