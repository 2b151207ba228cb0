// Causal attention in float32 on CUDA, backward, without atomics: one kernel goes over the keys of each block of
// queries and writes their gradients, one goes over the queries of each tile of keys (its own sequence's, then those
// that share it) and writes theirs. Weights are computed anew from lse, so nothing depends on how the forward cut its
// tiles.
#include "kernels/cuda/attention_tiles.cuh"
#include "kernels/cuda/group_reduce.cuh"
#include "kernels/cuda/model_launchers.h"

namespace nemo_rl::kernels {
namespace {

constexpr int kPadded = kTile + 1;        // transposed tiles are read along both directions
constexpr int kWeightStride = kTile + 4;  // rows of weights stay multiples of 16 bytes

/// The warp's row of d_out and out.
__device__ __forceinline__ std::int64_t warp_row() {
  return blockIdx.x * std::int64_t{kAttentionWarps} + threadIdx.x / 32;
}
/// d_out . out of a row, in every lane.
template <class Elem>
__device__ __forceinline__ float dot_of_row(const AttentionBackwardCudaArgs& p, std::int64_t row) {
  const std::int64_t H = p.shape.head_dim;
  const Elem* const out = static_cast<const Elem*>(p.out) + row * H;
  const Elem* const d_out = static_cast<const Elem*>(p.d_out) + row * H;
  float sum = 0;
  for (std::int64_t h = threadIdx.x % 32; h < H; h += 32) sum = fmaf(widen(d_out[h]), widen(out[h]), sum);
  return warp_all(sum, AddOp());
}

/// dots[t, n] = d_out . out of a row, a warp each.
template <class Elem>
__global__ void __launch_bounds__(kAttentionThreads) dots_kernel(AttentionBackwardCudaArgs p) {
  const std::int64_t row = warp_row();
  if (row >= p.tokens * p.shape.num_heads) return;
  const float dot = dot_of_row<Elem>(p, row);
  if (threadIdx.x % 32 == 0) p.dots[row] = dot;
}

/// terms[t, n] = -e^(sinks[n] - lse[t, n]) * (d_out . out), a warp each.
template <class Elem>
__global__ void __launch_bounds__(kAttentionThreads)
    sink_terms_kernel(AttentionBackwardCudaArgs p, const Elem* sinks, float* terms) {
  const std::int64_t row = warp_row();
  if (row >= p.tokens * p.shape.num_heads) return;
  const float dot = dot_of_row<Elem>(p, row);
  if (threadIdx.x % 32 == 0) terms[row] = -expf(widen(sinks[row % p.shape.num_heads]) - p.lse[row]) * dot;
}

/// Query rows in shared memory: scaled queries and the gradients of their outputs.
template <int Rows>
struct QueryBlock {
  static constexpr int kRows = kAttentionWarps * Rows;
  float *q, *d_out;  ///< [kRows][H]
  float lse2[Rows], dot[Rows];
  int rows;

  /// Tokens [token, token + tokens) from row `first_row` on, all heads of the group. Ends with a barrier.
  __device__ void load(const AttentionBackwardCudaArgs& p, std::int64_t first_row, std::int64_t tokens,
                       std::int64_t first_head) {
    const AttentionShape& s = p.shape;
    const std::int64_t group = s.group();
    const int H = static_cast<int>(s.head_dim), warp = threadIdx.x / 32;
    rows = static_cast<int>(tokens * group);
    load_straight(
        [&](int r) {
          return r < rows ? static_cast<const float*>(p.qkv) + (first_row + r / group) * s.row_stride() +
                                (first_head + r % group) * H
                          : static_cast<const float*>(nullptr);
        },
        kRows, H, q);
    load_straight(
        [&](int r) {
          return r < rows ? static_cast<const float*>(p.d_out) +
                                ((first_row + r / group) * s.num_heads + first_head + r % group) * H
                          : static_cast<const float*>(nullptr);
        },
        kRows, H, d_out);
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const int r = warp * Rows + i;
      const std::int64_t at = (first_row + r / group) * s.num_heads + first_head + r % group;
      lse2[i] = r < rows ? p.lse[at] * kLog2E : 0.0f;
      dot[i] = r < rows ? p.dots[at] : 0.0f;
    }
    __syncthreads();
  }

  /// Of this lane's key: weight P and gradient of the score dS for the warp's rows; zeros where visible(r) says it is
  /// not seen.
  template <class Visible>
  __device__ __forceinline__ void weights(const float* keys, const float* values, int H, float scale2, Softcap softcap,
                                          const Visible& visible, float (&p)[Rows], float (&ds)[Rows]) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float* const rows_q = q + warp * Rows * H;
    const float* const rows_d = d_out + warp * Rows * H;
#pragma unroll
    for (int i = 0; i < Rows; ++i) p[i] = ds[i] = 0;
    for (int h = 0; h < H; h += 4) {
      float k[4], v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) k[j] = keys[(h + j) * kPadded + lane], v[j] = values[(h + j) * kPadded + lane];
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(rows_q + i * H + h),
                     g = *reinterpret_cast<const float4*>(rows_d + i * H + h);
        p[i] = fmaf(x.w, k[3], fmaf(x.z, k[2], fmaf(x.y, k[1], fmaf(x.x, k[0], p[i]))));
        ds[i] = fmaf(g.w, v[3], fmaf(g.z, v[2], fmaf(g.y, v[1], fmaf(g.x, v[0], ds[i]))));
      }
    }
#pragma unroll
    for (int i = 0; i < Rows; ++i) {
      const int r = warp * Rows + i;
      const bool seen = r < rows && visible(r, lane);
      float slope = 1;
      if (softcap.out > 0) {
        const float t = tanhf(p[i] * softcap.in);
        p[i] = t * softcap.out, slope = 1 - t * t;
      }
      p[i] = seen ? exp2f(p[i] * scale2 - lse2[i]) : 0.0f;
      ds[i] = seen ? p[i] * (ds[i] - dot[i]) * slope : 0.0f;
    }
  }
};

/// Gradients of the queries of one block.
template <int Dims, int Rows>
__global__ void __launch_bounds__(kAttentionThreads) queries_kernel(AttentionBackwardCudaArgs p) {
  extern __shared__ __align__(16) float shared[];
  const AttentionShape s = p.shape;
  const AttentionBlock block = p.blocks[blockIdx.x];
  const std::int64_t kv_head = blockIdx.y, group = s.group(), first_head = kv_head * group;
  const int H = static_cast<int>(s.head_dim), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  QueryBlock<Rows> queries;
  queries.q = shared;
  queries.d_out = queries.q + queries.kRows * H;
  float* const keys = queries.d_out + queries.kRows * H;
  float* const values = keys + H * kPadded;
  queries.load(p, block.query_row, block.tokens, first_head);

  const float scale2 = static_cast<float>(s.scale * 1.44269504088896340736);
  const auto key_view = key_rows(s, p.qkv, kv_head), value_view = value_rows(s, p.qkv, kv_head);
  const std::int64_t count = block.position + block.tokens;
  float acc[Rows][Dims] = {};
  for (std::int64_t begin = s.first_key(block.position) / kTile * kTile; begin < count; begin += kTile) {
    const auto in = [&](const HeadRowsView& rows) {
      return [&, rows](int j) {
        const std::int64_t position = begin + j;
        if (position >= count) return static_cast<const float*>(nullptr);
        return rows.row(position < block.prefix_length ? block.prefix_start + position
                                                       : block.own_start + position - block.prefix_length);
      };
    };
    load_transposed<kPadded>(in(key_view), H, keys);
    load_transposed<kPadded>(in(value_view), H, values);
    __syncthreads();
    float weight[Rows], ds[Rows];
    queries.weights(
        keys, values, H, scale2, Softcap(s),
        [&](int r, int j) {
          const std::int64_t position = block.position + r / group;
          return begin + j <= position && begin + j >= s.first_key(position);
        },
        weight, ds);
#pragma unroll 2
    for (int j = 0; j < kTile; ++j) {
      float k[Dims];
#pragma unroll
      for (int c = 0; c < Dims; ++c) k[c] = lane + 32 * c < H ? keys[(lane + 32 * c) * kPadded + j] : 0.0f;
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        const float w = __shfl_sync(0xffffffffu, ds[i], j);
#pragma unroll
        for (int c = 0; c < Dims; ++c) acc[i][c] = fmaf(w, k[c], acc[i][c]);
      }
    }
    __syncthreads();  // before the next tile
  }
#pragma unroll
  for (int i = 0; i < Rows; ++i) {
    const int r = warp * Rows + i;
    if (r >= queries.rows) continue;
    float* const to =
        static_cast<float*>(p.d_qkv) + (block.query_row + r / group) * s.row_stride() + (first_head + r % group) * H;
#pragma unroll
    for (int c = 0; c < Dims; ++c)
      if (lane + 32 * c < H) to[lane + 32 * c] = acc[i][c] * static_cast<float>(s.scale);
  }
}

/// Gradients of kKeyTile keys and their values. Warp w sums those of keys 4w to 4w + 3, lanes over the head's
/// dimensions.
template <int Dims, int Rows>
struct KeyBlock {
  static constexpr int kKeys = kTile / kAttentionWarps;
  const AttentionBackwardCudaArgs& p;
  QueryBlock<Rows> queries;
  float *keys, *values, *weights, *d_scores;
  float d_keys[kKeys][Dims] = {}, d_values[kKeys][Dims] = {};

  __device__ KeyBlock(const AttentionBackwardCudaArgs& args, float* shared) : p(args) {
    const int H = static_cast<int>(p.shape.head_dim), rows = queries.kRows;
    queries.q = shared;
    queries.d_out = queries.q + rows * H;
    weights = queries.d_out + rows * H;
    d_scores = weights + rows * kWeightStride;
    keys = d_scores + rows * kWeightStride;
    values = keys + H * kPadded;
  }

  /// Adds what query tokens [begin, end) of a sequence (own rows from `start` on) give; visible(token, j): whether it
  /// sees key j.
  template <class Visible>
  __device__ void add(std::int64_t start, std::int64_t begin, std::int64_t end, std::int64_t kv_head,
                      const Visible& visible) {
    const std::int64_t group = p.shape.group(), step = queries.kRows / group;
    const int H = static_cast<int>(p.shape.head_dim), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float scale2 = static_cast<float>(p.shape.scale * 1.44269504088896340736);
    for (std::int64_t token = begin; token < end; token += step) {
      queries.load(p, start + token, end - token < step ? end - token : step, kv_head * group);
      float weight[Rows], ds[Rows];
      queries.weights(
          keys, values, H, scale2, Softcap(p.shape), [&](int r, int j) { return visible(token + r / group, j); },
          weight, ds);
#pragma unroll
      for (int i = 0; i < Rows; ++i) {
        weights[(warp * Rows + i) * kWeightStride + lane] = weight[i];
        d_scores[(warp * Rows + i) * kWeightStride + lane] = ds[i];
      }
      __syncthreads();
      for (int r = 0; r < queries.rows; ++r) {
        const float4 w = *reinterpret_cast<const float4*>(weights + r * kWeightStride + warp * kKeys);
        const float4 d = *reinterpret_cast<const float4*>(d_scores + r * kWeightStride + warp * kKeys);
        const float of_value[kKeys] = {w.x, w.y, w.z, w.w}, of_key[kKeys] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int c = 0; c < Dims; ++c) {
          const int h = lane + 32 * c;
          const float g = h < H ? queries.d_out[r * H + h] : 0.0f, x = h < H ? queries.q[r * H + h] : 0.0f;
#pragma unroll
          for (int k = 0; k < kKeys; ++k) {
            d_values[k][c] = fmaf(of_value[k], g, d_values[k][c]);
            d_keys[k][c] = fmaf(of_key[k], x, d_keys[k][c]);
          }
        }
      }
      __syncthreads();  // before the next queries
    }
  }
};

template <int Dims, int Rows>
__global__ void __launch_bounds__(kAttentionThreads) keys_kernel(AttentionBackwardCudaArgs p) {
  extern __shared__ __align__(16) float shared[];
  const AttentionShape s = p.shape;
  const AttentionKeyBlock work = p.key_blocks[blockIdx.x];
  const AttentionSequence sequence = p.sequences[work.sequence];
  const std::int64_t kv_head = blockIdx.y, begin = work.key_begin;
  const int H = static_cast<int>(s.head_dim), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  static_assert(KeyBlock<Dims, Rows>::kKeys == 4, "a float4 of weights a warp");
  KeyBlock<Dims, Rows> block(p, shared);
  const auto in = [&](const HeadRowsView& rows) {
    return [&, rows](int j) {
      return begin + j < sequence.length ? rows.row(sequence.start + begin + j) : static_cast<const float*>(nullptr);
    };
  };
  load_transposed<kPadded>(in(key_rows(s, p.qkv, kv_head)), H, block.keys);
  load_transposed<kPadded>(in(value_rows(s, p.qkv, kv_head)), H, block.values);
  __syncthreads();
  const auto end_of = [&](std::int64_t length, std::int64_t tokens) {  // of the queries that see a key of this block
    const std::int64_t end = begin + kTile - 1 + s.window - tokens;
    return s.window == 0 || end > length ? length : end;
  };
  block.add(sequence.start, begin, end_of(sequence.length, 0), kv_head,
            [&](std::int64_t token, int j) { return begin + j <= token && begin + j >= s.first_key(token); });
  for (std::int64_t i = work.sharer_begin; i < work.sharer_end; ++i) {
    const AttentionSequence sharer = p.sequences[p.sharers[i]];
    if (sharer.prefix_length > begin)
      block.add(sharer.start, 0, end_of(sharer.length, sharer.prefix_length), kv_head, [&](std::int64_t token, int j) {
        return begin + j < sharer.prefix_length && begin + j >= s.first_key(sharer.prefix_length + token);
      });
  }
#pragma unroll
  for (int k = 0; k < block.kKeys; ++k) {
    const std::int64_t key = begin + warp * block.kKeys + k;
    if (key >= sequence.length) continue;
    float* const d_key =
        static_cast<float*>(p.d_qkv) + (sequence.start + key) * s.row_stride() + (s.num_heads + kv_head) * H;
#pragma unroll
    for (int c = 0; c < Dims; ++c) {
      const int h = lane + 32 * c;
      if (h >= H) continue;
      d_key[h] = block.d_keys[k][c] * static_cast<float>(s.scale);
      d_key[s.num_kv_heads * H + h] = block.d_values[k][c];
    }
  }
}

template <class Kernel>
cudaError_t launch_kernel(Kernel* kernel, const AttentionBackwardCudaArgs& p, std::int64_t blocks, std::int64_t floats,
                          cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  const auto bytes = static_cast<int>(floats * sizeof(float));
  if (const auto status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      status != cudaSuccess)
    return status;
  kernel<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.shape.num_kv_heads)), kAttentionThreads, bytes,
           stream>>>(p);
  return cudaGetLastError();
}

template <int Dims, int Rows>
cudaError_t launch(const AttentionBackwardCudaArgs& p, cudaStream_t stream) {
  const std::int64_t H = p.shape.head_dim, rows = kAttentionWarps * Rows, floats = 2 * rows * H + 2 * H * kPadded;
  if (const auto status = launch_kernel(queries_kernel<Dims, Rows>, p, p.num_blocks, floats, stream);
      status != cudaSuccess)
    return status;
  return launch_kernel(keys_kernel<Dims, Rows>, p, p.num_key_blocks, floats + 2 * rows * kWeightStride, stream);
}

unsigned row_blocks(const AttentionBackwardCudaArgs& p) {
  return static_cast<unsigned>((p.tokens * p.shape.num_heads + kAttentionWarps - 1) / kAttentionWarps);
}

}  // namespace

cudaError_t attention_backward_launch(const AttentionBackwardCudaArgs& p, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  if (p.shape.type == ElementType::bfloat16) {
    dots_kernel<bfloat16><<<row_blocks(p), kAttentionThreads, 0, stream>>>(p);
    return attention_backward_mma_launch(p, stream);
  }
  dots_kernel<float><<<row_blocks(p), kAttentionThreads, 0, stream>>>(p);
  if (p.shape.head_dim <= 64) return launch<2, 4>(p, stream);
  return p.shape.head_dim <= 128 ? launch<4, 4>(p, stream) : launch<8, 1>(p, stream);
}

cudaError_t attention_sinks_backward_launch(const AttentionBackwardCudaArgs& p, const void* sinks, float* terms,
                                            float* parts, float* d_sinks, cudaStream_t stream) {
  if (p.tokens == 0) return cudaSuccess;
  if (p.shape.type == ElementType::bfloat16)
    sink_terms_kernel<bfloat16>
        <<<row_blocks(p), kAttentionThreads, 0, stream>>>(p, static_cast<const bfloat16*>(sinks), terms);
  else
    sink_terms_kernel<float>
        <<<row_blocks(p), kAttentionThreads, 0, stream>>>(p, static_cast<const float*>(sinks), terms);
  const std::int64_t N = p.shape.num_heads;
  return add_column_sums_launch(terms, N, p.tokens, N, parts, d_sinks, stream);
}

}  // namespace nemo_rl::kernels
