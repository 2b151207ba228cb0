// Writing and copying blocks of the KV cache on CUDA. Only moves bits: the element type matters by its size.
#include "kernels/cuda/attention_launchers.h"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;

template <class Elem>
__global__ void __launch_bounds__(kThreads)
    write_kernel(AttentionShape s, const Elem* qkv, const std::int64_t* slots, Elem* cache) {
  const std::int64_t t = blockIdx.x, slot = slots[t], H = s.head_dim, size = s.num_kv_heads * H;
  if (slot < 0) return;
  const std::int64_t lane = slot % kKeyTile;
  Elem* const block = cache + slot / kKeyTile * 2 * size * kKeyTile;
  const Elem* const keys = qkv + t * s.row_stride() + s.num_heads * H;
  for (std::int64_t i = threadIdx.x; i < size; i += kThreads) {
    const std::int64_t head = i / H, h = i % H;
    Elem* const tile = block + head * 2 * H * kKeyTile;
    tile[h * kKeyTile + lane] = keys[i];
    tile[H * kKeyTile + lane * H + h] = keys[size + i];
  }
}

template <class Elem>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(AttentionShape s, Elem* cache, std::int64_t from, std::int64_t to, std::int64_t length) {
  const std::int64_t H = s.head_dim, tile = H * kKeyTile, size = s.num_kv_heads * 2 * tile;
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < size;
       i += std::int64_t{kThreads} * gridDim.x) {
    const bool value = i / tile % 2 == 1;
    const std::int64_t position = value ? i % tile / H : i % kKeyTile;
    if (position < length) cache[to * size + i] = cache[from * size + i];
  }
}

}  // namespace

cudaError_t kv_cache_write_launch(const AttentionShape& shape, const void* qkv, const std::int64_t* slots,
                                  std::int64_t tokens, void* cache, cudaStream_t stream) {
  if (tokens == 0) return cudaSuccess;
  const auto grid = static_cast<unsigned>(tokens);
  if (shape.type == ElementType::float32) {
    write_kernel<<<grid, kThreads, 0, stream>>>(shape, static_cast<const std::uint32_t*>(qkv), slots,
                                                static_cast<std::uint32_t*>(cache));
  } else {
    write_kernel<<<grid, kThreads, 0, stream>>>(shape, static_cast<const std::uint16_t*>(qkv), slots,
                                                static_cast<std::uint16_t*>(cache));
  }
  return cudaGetLastError();
}

cudaError_t kv_cache_copy_launch(const AttentionShape& shape, void* cache, std::int64_t from, std::int64_t to,
                                 std::int64_t length, cudaStream_t stream) {
  const std::int64_t size = shape.num_kv_heads * 2 * shape.head_dim * kKeyTile;
  const auto grid = static_cast<unsigned>((size + kThreads - 1) / kThreads);
  if (shape.type == ElementType::float32) {
    copy_kernel<<<grid, kThreads, 0, stream>>>(shape, static_cast<std::uint32_t*>(cache), from, to, length);
  } else {
    copy_kernel<<<grid, kThreads, 0, stream>>>(shape, static_cast<std::uint16_t*>(cache), from, to, length);
  }
  return cudaGetLastError();
}

}  // namespace nemo_rl::kernels
