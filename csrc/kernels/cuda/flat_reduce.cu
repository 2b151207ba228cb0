// Sums over rows and over flat buffers on CUDA in a fixed order, without atomics: column sums, sums of squares of
// blocks; and the digest of the weights.
#include "kernels/cuda/block_reduce.cuh"
#include "kernels/cuda/model_launchers.h"
#include "kernels/cuda/vector_access.cuh"
#include "kernels/weight_digest.h"

namespace nemo_rl::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kPartRows = 16;  // warps that share the parts of 32 columns

template <class X>
__global__ void __launch_bounds__(kThreads)
    column_parts_kernel(const X* x, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* parts) {
  const std::int64_t c = blockIdx.x * std::int64_t{kThreads} + threadIdx.x;
  if (c >= columns) return;
  const std::int64_t begin = blockIdx.y * kRowsPerPart, end = begin + kRowsPerPart < rows ? begin + kRowsPerPart : rows;
  float sum = 0;
  for (std::int64_t t = begin; t < end; ++t) sum += widen(x[t * stride + c]);
  parts[blockIdx.y * columns + c] = sum;
}

/// out[c] += sum over parts: warp w takes parts w, w + kPartRows, ...; then the warps in order.
__global__ void __launch_bounds__(kWarp* kPartRows)
    add_parts_kernel(const float* parts, std::int64_t num_parts, std::int64_t columns, float* out) {
  __shared__ float sums[kPartRows][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const std::int64_t c = blockIdx.x * std::int64_t{kWarp} + lane;
  float sum = 0;
  for (std::int64_t p = warp; p < num_parts && c < columns; p += kPartRows) sum += parts[p * columns + c];
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || c >= columns) return;
  for (int w = 1; w < kPartRows; ++w) sum += sums[w][lane];
  out[c] += sum;
}

__global__ void __launch_bounds__(kThreads)
    block_squares_kernel(const float* x, std::int64_t n, std::int64_t block, double* squares, bool vectors) {
  __shared__ double shared[kMaxWarps];
  const std::int64_t begin = blockIdx.x * block, end = begin + block < n ? begin + block : n;
  double sum = 0;
  for (std::int64_t i = begin + threadIdx.x * std::int64_t{kEight}; i < end; i += kThreads * kEight) {
    float v[kEight];
    load8(x + i, end - i, vectors, v);
#pragma unroll
    for (int k = 0; k < kEight; ++k) sum += static_cast<double>(v[k]) * static_cast<double>(v[k]);
  }
  sum = block_reduce(RowMerge::sum, sum, shared);
  if (threadIdx.x == 0) squares[blockIdx.x] = sum;
}

/// Four neighbouring threads do the four chains of a block of bytes.
__global__ void __launch_bounds__(kThreads)
    digest_kernel(const unsigned char* bytes, std::int64_t n, std::uint64_t* parts) {
  const std::int64_t b = (blockIdx.x * std::int64_t{kThreads} + threadIdx.x) / kDigestChains, begin = b * kDigestBlock;
  const int k = threadIdx.x % kDigestChains;
  std::uint64_t chain = kDigestStart + k;
  const bool any = begin < n;
  if (any) {
    const std::int64_t size = n - begin < kDigestBlock ? n - begin : kDigestBlock, whole = size / 32 * 32;
    for (std::int64_t i = 0; i < whole; i += 32)
      chain = digest_add(chain, *reinterpret_cast<const std::uint64_t*>(bytes + begin + i + 8 * k));
    for (std::int64_t i = whole; k == 0 && i < size; ++i) chain = digest_add_byte(chain, bytes[begin + i]);
  }
  std::uint64_t hash = kDigestStart;
  for (int j = 0; j < kDigestChains; ++j) hash = digest_add(hash, __shfl_sync(0xffffffffu, chain, j, kDigestChains));
  if (any && k == 0) parts[b] = hash;
}

}  // namespace

cudaError_t add_parts_launch(const float* parts, std::int64_t num_parts, std::int64_t columns, float* out,
                             cudaStream_t stream) {
  if (num_parts == 0 || columns == 0) return cudaSuccess;
  add_parts_kernel<<<static_cast<unsigned>((columns + kWarp - 1) / kWarp), kWarp * kPartRows, 0, stream>>>(
      parts, num_parts, columns, out);
  return cudaGetLastError();
}

template <class X>
cudaError_t add_column_sums_launch(const X* x, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                                   float* parts, float* out, cudaStream_t stream) {
  if (rows == 0 || columns == 0) return cudaSuccess;
  const std::int64_t num_parts = (rows + kRowsPerPart - 1) / kRowsPerPart;
  const dim3 grid(static_cast<unsigned>((columns + kThreads - 1) / kThreads), static_cast<unsigned>(num_parts));
  column_parts_kernel<X><<<grid, kThreads, 0, stream>>>(x, stride, rows, columns, parts);
  return add_parts_launch(parts, num_parts, columns, out, stream);
}

cudaError_t block_squares_launch(const float* x, std::int64_t n, std::int64_t block, double* squares,
                                 cudaStream_t stream) {
  const std::int64_t blocks = (n + block - 1) / block;
  if (blocks == 0) return cudaSuccess;
  block_squares_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(x, n, block, squares,
                                                                               vectorizable(x, 0));
  return cudaGetLastError();
}

cudaError_t weight_digest_launch(const void* bytes, std::int64_t n, std::uint64_t* parts, cudaStream_t stream) {
  const std::int64_t chains = (n + kDigestBlock - 1) / kDigestBlock * kDigestChains;
  if (chains == 0) return cudaSuccess;
  digest_kernel<<<static_cast<unsigned>((chains + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
      static_cast<const unsigned char*>(bytes), n, parts);
  return cudaGetLastError();
}

template cudaError_t add_column_sums_launch(const float*, std::int64_t, std::int64_t, std::int64_t, float*, float*,
                                            cudaStream_t);
template cudaError_t add_column_sums_launch(const bfloat16*, std::int64_t, std::int64_t, std::int64_t, float*, float*,
                                            cudaStream_t);

}  // namespace nemo_rl::kernels
