// Attention in float32: tiles of keys and values on their way into shared memory, from rows of qkv or from blocks of
// the cache. Positions that hold no key become zeros, so that what lies there does not matter.
#pragma once
#include "kernels/cuda/attention_launchers.h"
#include "kernels/cuda/vector_access.cuh"

namespace nemo_rl::kernels {

constexpr int kAttentionThreads = 256;
constexpr int kAttentionWarps = kAttentionThreads / 32;
static_assert(kTile == 32, "a lane a key");

/// Where rows of qkv lie: queries, keys or values of one head.
struct HeadRowsView {
  const float* first;
  std::int64_t stride;
  __device__ const float* row(std::int64_t r) const { return first + r * stride; }
};
__device__ __forceinline__ HeadRowsView key_rows(const AttentionShape& s, const void* qkv, std::int64_t kv_head) {
  return {static_cast<const float*>(qkv) + (s.num_heads + kv_head) * s.head_dim, s.row_stride()};
}
__device__ __forceinline__ HeadRowsView value_rows(const AttentionShape& s, const void* qkv, std::int64_t kv_head) {
  return {static_cast<const float*>(qkv) + (s.num_heads + s.num_kv_heads + kv_head) * s.head_dim, s.row_stride()};
}

/// to[h * Stride + j] = row(j)[h] for j < kTile: lanes run over keys. row(j) is null where there is no key.
template <int Stride, class Row>
__device__ __forceinline__ void load_transposed(const Row& row, int H, float* to) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float* const from = row(lane);
  for (int h = warp * kEight; h < H; h += kAttentionWarps * kEight) {
    float v[kEight] = {};
    if (from != nullptr) load_vector(from + h, v);
#pragma unroll
    for (int i = 0; i < kEight; ++i) to[(h + i) * Stride + lane] = v[i];
  }
}

/// to[j * H + h] = row(j)[h] for j < rows.
template <class Row>
__device__ __forceinline__ void load_straight(const Row& row, int rows, int H, float* to) {
  const int chunks = H / kEight;
  for (int i = threadIdx.x; i < rows * chunks; i += kAttentionThreads) {
    const int j = i / chunks, h = i % chunks * kEight;
    float v[kEight] = {};
    if (const float* const from = row(j); from != nullptr) load_vector(from + h, v);
    store_vector(to + j * H + h, v);
  }
}

/// Keys and values that are rows of qkv.
struct PackedKeys {
  HeadRowsView keys, values;
  std::int64_t prefix_start, prefix_length, own_start, count;
  __device__ PackedKeys(const AttentionCudaArgs& p, const AttentionBlock& b, std::int64_t kv_head)
      : keys(key_rows(p.shape, p.qkv, kv_head)),
        values(value_rows(p.shape, p.qkv, kv_head)),
        prefix_start(b.prefix_start),
        prefix_length(b.prefix_length),
        own_start(b.own_start),
        count(b.position + b.tokens) {}
  __device__ std::int64_t row(std::int64_t position) const {
    return position < prefix_length ? prefix_start + position : own_start + position - prefix_length;
  }
  __device__ void load(std::int64_t tile, int H, float* to_keys, float* to_values) const {
    const auto in = [&](const HeadRowsView& rows) {
      return [this, rows, tile](int j) {
        const std::int64_t position = tile * kTile + j;
        return position < count ? rows.row(row(position)) : static_cast<const float*>(nullptr);
      };
    };
    load_transposed<kTile>(in(keys), H, to_keys);
    load_straight(in(values), kTile, H, to_values);
  }
};

/// Keys and values in blocks of the cache.
struct CachedKeys {
  const float* cache;
  const std::int32_t* table;
  std::int64_t kv_head, num_kv_heads, count;
  __device__ CachedKeys(const AttentionCudaArgs& p, const AttentionBlock& b, std::int64_t head)
      : cache(static_cast<const float*>(p.cache)),
        table(p.block_tables + b.block_table),
        kv_head(head),
        num_kv_heads(p.shape.num_kv_heads),
        count(b.position + b.tokens) {}
  __device__ void load(std::int64_t tile, int H, float* to_keys, float* to_values) const {
    const float* const keys = cache + (table[tile] * num_kv_heads + kv_head) * 2 * H * kTile;
    const float* const values = keys + H * kTile;
    const std::int64_t present = count - tile * kTile;  // of the tile's positions
    for (int i = threadIdx.x; i < H * (kTile / kEight); i += kAttentionThreads) {
      const int h = i / (kTile / kEight), j = i % (kTile / kEight) * kEight;
      float v[kEight];
      load_vector(keys + h * kTile + j, v);
#pragma unroll
      for (int k = 0; k < kEight; ++k) v[k] = j + k < present ? v[k] : 0.0f;
      store_vector(to_keys + h * kTile + j, v);
    }
    load_straight([&](int j) { return j < present ? values + j * H : static_cast<const float*>(nullptr); }, kTile, H,
                  to_values);
  }
};

}  // namespace nemo_rl::kernels
