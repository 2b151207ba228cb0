// Causal attention in float32 on CUDA, forward: packed sequences and sequences in a blocked cache run one kernel, so a
// token's result is the same bits in both. A warp holds some query rows; its lanes run over a tile's keys for the
// scores, and over the head's dimensions for the weighted values. Every row is a chain of its own: how rows are grouped
// does not change a bit.
#include "kernels/cuda/attention_tiles.cuh"
#include "kernels/cuda/group_reduce.cuh"

namespace nemo_rl::kernels {
namespace {

/// Rows of one warp and their running state. Roundings are written out, so that no multiplication is fused in one
/// instance of the template and not in another.
template <int Rows, int Dims>
struct WarpRows {
  float max[Rows], sum[Rows], acc[Rows][Dims];
  int hidden[Rows], visible[Rows];  ///< a row sees keys [hidden, visible) of the present tile

  /// sink(i): row i's, times log2(e); -INFINITY: it has none. Lane 0 has the sink's term of the sum.
  template <class Sink>
  __device__ __forceinline__ void begin(const Sink& sink) {
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      max[i] = sink(i), sum[i] = max[i] != -INFINITY && threadIdx.x % 32 == 0 ? 1.0f : 0.0f;
#pragma unroll
      for (int c = 0; c < Dims; ++c) acc[i][c] = 0;
    }
  }

  /// score[i] = q row i . key of this lane.
  __device__ __forceinline__ void score(const float* q, const float* keys, int H, float (&score)[Rows]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Rows; ++i) score[i] = 0;
    for (int h = 0; h < H; h += 4) {
      const float k0 = keys[h * kTile + lane], k1 = keys[(h + 1) * kTile + lane], k2 = keys[(h + 2) * kTile + lane],
                  k3 = keys[(h + 3) * kTile + lane];
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(q + i * H + h);
        score[i] = fmaf(x.w, k3, fmaf(x.z, k2, fmaf(x.y, k1, fmaf(x.x, k0, score[i]))));
      }
    }
  }

  /// Scores become weights; maximum, sum and accumulator are brought up to date.
  __device__ __forceinline__ void softmax(float (&score)[Rows]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      if (visible[i] <= hidden[i]) continue;  // the whole warp
      const float x = lane >= hidden[i] && lane < visible[i] ? score[i] : -INFINITY;
      const float best = warp_all(x, MaxOp()), new_max = best > max[i] ? best : max[i];
      score[i] = exp2f(__fsub_rn(x, new_max));
      if (new_max != max[i]) {
        const float factor = exp2f(__fsub_rn(max[i], new_max));
        sum[i] = __fmul_rn(sum[i], factor);
#pragma unroll
        for (int c = 0; c < Dims; ++c) acc[i][c] = __fmul_rn(acc[i][c], factor);
        max[i] = new_max;
      }
      sum[i] = __fadd_rn(sum[i], score[i]);
    }
  }

  /// acc += weight of key j times its value, j ascending; keys that a row does not see are not multiplied.
  template <bool All>
  __device__ __forceinline__ void add_values(const float (&weight)[Rows], const float* values, int H) {
    const int lane = threadIdx.x % 32;
#pragma unroll 4
    for (int j = 0; j < kTile; ++j) {
      float v[Dims];
#pragma unroll
      for (int c = 0; c < Dims; ++c) v[c] = lane + 32 * c < H ? values[j * H + lane + 32 * c] : 0.0f;
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        const float w = __shfl_sync(0xffffffffu, weight[i], j);
        if (!All && (j < hidden[i] || j >= visible[i])) continue;
#pragma unroll
        for (int c = 0; c < Dims; ++c) acc[i][c] = fmaf(w, v[c], acc[i][c]);
      }
    }
  }
};

template <int Dims, int Rows, class Keys>
__global__ void __launch_bounds__(kAttentionThreads) forward_kernel(AttentionCudaArgs p) {
  extern __shared__ __align__(16) float shared[];
  const AttentionShape s = p.shape;
  const AttentionBlock block = p.blocks[blockIdx.x];
  if (block.tokens == 0) return;
  const std::int64_t kv_head = blockIdx.y, group = s.group(), first_head = kv_head * group;
  const int H = static_cast<int>(s.head_dim), lane = threadIdx.x % 32, warp = threadIdx.x / 32,
            rows = static_cast<int>(block.tokens * group);
  float* const keys = shared;
  float* const values = keys + H * kTile;
  float* const q = values + H * kTile;  // [kAttentionWarps * Rows][H]

  const auto query = [&](int r) {
    return r < rows ? static_cast<const float*>(p.qkv) + (block.query_row + r / group) * s.row_stride() +
                          (first_head + r % group) * H
                    : static_cast<const float*>(nullptr);
  };
  load_straight(query, kAttentionWarps * Rows, H, q);
  __syncthreads();
  const float scale = static_cast<float>(s.scale * 1.44269504088896340736);
  const float softcap = static_cast<float>(s.softcap * 1.44269504088896340736);
  for (int i = threadIdx.x; i < kAttentionWarps * Rows * H; i += kAttentionThreads) q[i] = __fmul_rn(q[i], scale);

  const Keys source(p, block, kv_head);
  WarpRows<Rows, Dims> state;
  const auto* const sinks = static_cast<const float*>(p.sinks);
  state.begin([&](int i) {
    const int r = warp * Rows + i;
    return sinks != nullptr && r < rows ? __fmul_rn(sinks[first_head + r % group], kLog2E) : -INFINITY;
  });
  const std::int64_t tiles = (block.position + block.tokens - 1) / kTile + 1;
  for (std::int64_t t = s.first_key(block.position) / kTile; t < tiles; ++t) {
    __syncthreads();  // everyone is done with the tile before (and with q)
    source.load(t, H, keys, values);
    __syncthreads();
    bool any = false, all = true;
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const int r = warp * Rows + i;
      const std::int64_t position = block.position + r / group, seen = r < rows ? position + 1 - t * kTile : 0,
                         before = s.first_key(position) - t * kTile;
      state.visible[i] = seen <= 0 ? 0 : (seen >= kTile ? kTile : static_cast<int>(seen));
      state.hidden[i] = before <= 0 ? 0 : (before >= kTile ? kTile : static_cast<int>(before));
      any = any || state.visible[i] > state.hidden[i];
      all = all && state.visible[i] == kTile && state.hidden[i] == 0;
    }
    if (!any) continue;  // the whole warp; it meets the others at the next barrier
    float score[Rows];
    state.score(q + warp * Rows * H, keys, H, score);
    if (softcap > 0)
#pragma unroll
      for (int i = 0; i < Rows; ++i) score[i] = __fmul_rn(tanhf(__fdiv_rn(score[i], softcap)), softcap);
    state.softmax(score);
    if (all) {
      state.template add_values<true>(score, values, H);
    } else {
      state.template add_values<false>(score, values, H);
    }
  }

#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    const int r = warp * Rows + i;
    if (r >= rows) continue;
    const float total = warp_all(state.sum[i], AddOp()), inverse = __fdiv_rn(1.0f, total);
    const std::int64_t row = block.query_row + r / group, head = first_head + r % group;
    float* const out = static_cast<float*>(p.out) + (row * s.num_heads + head) * H;
#pragma unroll
    for (int c = 0; c < Dims; ++c)
      if (lane + 32 * c < H) out[lane + 32 * c] = __fmul_rn(state.acc[i][c], inverse);
    if (p.lse != nullptr && lane == 0)
      p.lse[row * s.num_heads + head] = __fmul_rn(kLn2, __fadd_rn(state.max[i], log2f(total)));
  }
}

template <int Dims, int Rows, class Keys>
cudaError_t launch(const AttentionCudaArgs& p, cudaStream_t stream) {
  const auto bytes = static_cast<int>((2 * kTile + kAttentionWarps * Rows) * p.shape.head_dim * sizeof(float));
  const auto kernel = forward_kernel<Dims, Rows, Keys>;
  if (const auto status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      status != cudaSuccess)
    return status;
  const dim3 grid(static_cast<unsigned>(p.num_blocks), static_cast<unsigned>(p.shape.num_kv_heads));
  kernel<<<grid, kAttentionThreads, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <class Keys>
cudaError_t launch_rows(const AttentionCudaArgs& p, AttentionRows rows, cudaStream_t stream) {
  const bool few = rows == AttentionRows::few;
  if (p.shape.head_dim <= 64) return few ? launch<2, 1, Keys>(p, stream) : launch<2, 8, Keys>(p, stream);
  if (p.shape.head_dim <= 128) return few ? launch<4, 1, Keys>(p, stream) : launch<4, 8, Keys>(p, stream);
  return few ? launch<8, 1, Keys>(p, stream) : launch<8, 4, Keys>(p, stream);
}

}  // namespace

cudaError_t attention_forward_launch(const AttentionCudaArgs& p, AttentionRows rows, cudaStream_t stream) {
  if (p.num_blocks == 0) return cudaSuccess;
  if (p.shape.type == ElementType::bfloat16) return attention_forward_mma_launch(p, rows, stream);
  return p.cache == nullptr ? launch_rows<PackedKeys>(p, rows, stream) : launch_rows<CachedKeys>(p, rows, stream);
}

}  // namespace nemo_rl::kernels
