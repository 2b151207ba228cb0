// Causal attention in bfloat16 on tensor cores, forward: packed sequences and sequences in a blocked cache run one
// kernel, so a token's result is the same bits in both. A warp holds 16 query rows; scores, weights and sums of a row
// stay in four of its lanes.
#include "kernels/cuda/attention_mma.cuh"
#include "kernels/cuda/group_reduce.cuh"

namespace nemo_rl::kernels {
namespace {

constexpr int kStages = 2;  // tiles in shared memory: one is multiplied while the next is copied

/// Keys and values that are rows of qkv.
template <int Threads, int Dims>
struct PackedTiles {
  static constexpr int kKeyElements = kTile * kStride<Dims>;
  AttentionShape shape;
  const bfloat16* first;
  KeyRows rows;
  __device__ PackedTiles(const AttentionCudaArgs& p, const AttentionBlock& b, std::int64_t kv_head)
      : shape(p.shape),
        first(static_cast<const bfloat16*>(p.qkv) + (shape.num_heads + kv_head) * shape.head_dim),
        rows(b) {}
  __device__ __forceinline__ void copy(int tile, bfloat16* keys, bfloat16* values) const {
    rows.copy<Threads, Dims>(shape, first, tile * kTile, keys, values);
  }
  __device__ __forceinline__ static auto keys_of(const bfloat16* keys) { return TileRows<Dims>{keys}; }
};

/// Keys and values in blocks of the cache. What lies behind the last position is not read as a value; as a key it may
/// be anything.
template <int Threads, int Dims>
struct CachedTiles {
  static constexpr int kKeyElements = Dims * kStride<kTile>;
  const bfloat16* first;
  const std::int32_t* table;
  std::int64_t block_elements;
  int count, H;
  __device__ CachedTiles(const AttentionCudaArgs& p, const AttentionBlock& b, std::int64_t kv_head)
      : first(static_cast<const bfloat16*>(p.cache) + kv_head * 2 * p.shape.head_dim * kTile),
        table(p.block_tables + b.block_table),
        block_elements(p.shape.num_kv_heads * 2 * p.shape.head_dim * kTile),
        count(static_cast<int>(b.position + b.tokens)),
        H(static_cast<int>(p.shape.head_dim)) {}
  __device__ __forceinline__ void copy(int tile, bfloat16* keys, bfloat16* values) const {
    const bfloat16* const from = first + table[tile] * block_elements;
    const int present = count - tile * kTile;
    for_eights<Threads, Dims, kTile>([&](int h, int j) {
      copy_async<16>(keys + h * kStride<kTile> + j, from + (h < H ? h * kTile + j : 0), h < H);
    });
    for_eights<Threads, kTile, Dims>([&](int j, int h) {
      const bool is_value = j < present && h < H;
      copy_async<16>(values + j * kStride<Dims> + h, from + (is_value ? H * kTile + j * H + h : 0), is_value);
    });
  }
  __device__ __forceinline__ static auto keys_of(const bfloat16* keys) { return TileColumns{keys}; }
};

/// Scores of keys that a row does not see, all but [before[i], visible[i]), become -inf.
__device__ __forceinline__ void hide(Scores& s, const int (&before)[2], const int (&visible)[2]) {
#pragma unroll
  for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (const int key = 8 * n + lane_column() + e % 2; key < before[e / 2] || key >= visible[e / 2])
        s[n][e] = -INFINITY;
}

/// Two rows of a lane and their running state. Roundings are written out, so that no multiplication is fused in one
/// instance of the template and not in another.
template <int Dims>
struct StripState {
  float max[2] = {-INFINITY, -INFINITY}, sum[2] = {}, acc[Dims / 8][4] = {};  // max: of scores before they are scaled

  /// Row i has seen its sink and no key. Of the four lanes that hold the row one has the sink's term of the sum.
  __device__ __forceinline__ void begin(int i, float sink, float natural_scale) {
    max[i] = __fdiv_rn(sink, natural_scale);
    sum[i] = lane_column() == 0 ? 1.0f : 0.0f;
  }

  /// Scores become weights; maximum, sum and accumulator are brought up to date. Rows that see no key yet keep their
  /// zeros.
  __device__ __forceinline__ void softmax(Scores& s, float scale) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float best = max[i];
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n) best = fmaxf(fmaxf(best, s[n][2 * i]), s[n][2 * i + 1]);
      best = row_all(best, fmaxf);
      const float top = best == -INFINITY ? 0.0f : best;
      const float base = __fmul_rn(top, -scale),
                  factor = power_of_2(__fmul_rn(__fsub_rn(max[i], top), scale));  // 1 without a new maximum
      max[i] = best;
      sum[i] = __fmul_rn(sum[i], factor);
#pragma unroll
      for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
        for (int c = 2 * i; c < 2 * i + 2; ++c) {
          s[n][c] = power_of_2(fmaf(s[n][c], scale, base));
          sum[i] = __fadd_rn(sum[i], s[n][c]);
        }
#pragma unroll
      for (int n = 0; n < Dims / 8; ++n)
        acc[n][2 * i] = __fmul_rn(acc[n][2 * i], factor), acc[n][2 * i + 1] = __fmul_rn(acc[n][2 * i + 1], factor);
    }
  }
};

template <int Dims, int Warps, class Tiles>
__global__ void __launch_bounds__(Warps * 32) forward_kernel(AttentionCudaArgs p) {
  extern __shared__ __align__(16) uint4 shared[];
  constexpr int kStage = Tiles::kKeyElements + kTile * kStride<Dims>;
  const AttentionShape& s = p.shape;
  const AttentionBlock block = p.blocks[blockIdx.x];
  if (block.tokens == 0) return;
  const std::int64_t kv_head = blockIdx.y, first_head = kv_head * s.group();
  const QueryRows queries(block.tokens, s.group());
  const int H = static_cast<int>(s.head_dim), strip = static_cast<int>(threadIdx.x / 32) * kStrip,
            position = static_cast<int>(block.position);
  bfloat16* const stages = reinterpret_cast<bfloat16*>(shared);
  bfloat16* const q = stages + kStages * kStage;
  const bfloat16* const first_query =
      static_cast<const bfloat16*>(p.qkv) + block.query_row * s.row_stride() + first_head * H;
  for_eights<Warps * 32, Warps * kStrip, Dims>([&](int r, int h) {
    const bool present = r < queries.rows && h < H;
    copy_async<16>(q + r * kStride<Dims> + h,
                   first_query + (present ? queries.offset(r, static_cast<int>(s.row_stride()), H) + h : 0), present);
  });

  const Tiles tiles(p, block, kv_head);
  const float scale = static_cast<float>(s.scale * 1.44269504088896340736);
  const int r = strip + lane_row(), keys_of_strip = position + queries.token(strip) + 1;
  const int keys_of_row[2] = {position + queries.token(r) + 1, position + queries.token(r + 8) + 1};
  const int first_of_row[2] = {static_cast<int>(s.first_key(keys_of_row[0] - 1)),
                               static_cast<int>(s.first_key(keys_of_row[1] - 1))},
            first_of_strip = static_cast<int>(s.first_key(position + queries.token(strip + kStrip - 1))),
            first_tile = static_cast<int>(s.first_key(position)) / kTile;
  StripState<Dims> state;
  if (const auto* const sinks = static_cast<const bfloat16*>(p.sinks); sinks != nullptr)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (const int row = r + 8 * i; row < queries.rows)
        state.begin(i, static_cast<float>(sinks[first_head + row - queries.token(row) * queries.group]),
                    static_cast<float>(s.scale));
  const Softcap softcap(s);
  pipeline<kStages>((static_cast<int>(block.position + block.tokens) - 1) / kTile + 1 - first_tile,
                    [&](int t, int stage) {
                      tiles.copy(first_tile + t, stages + stage * kStage,
                                 stages + stage * kStage + Tiles::kKeyElements);
                    },
                    [&](int step, int stage) {
                      const int t = first_tile + step;
                      if (strip >= queries.rows) return;  // the whole warp
                      const bfloat16* const keys = stages + stage * kStage;
                      Scores weights;
                      scores<Dims>(SharedStrip<Dims>{q + strip * kStride<Dims>}, Tiles::keys_of(keys), weights);
                      if (softcap.out > 0)
#pragma unroll
                        for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
                          for (int e = 0; e < 4; ++e)
                            weights[n][e] = __fmul_rn(tanhf(__fmul_rn(weights[n][e], softcap.in)), softcap.out);
                      if (keys_of_strip < (t + 1) * kTile || first_of_strip > t * kTile)
                        hide(weights, {first_of_row[0] - t * kTile, first_of_row[1] - t * kTile},
                             {keys_of_row[0] - t * kTile, keys_of_row[1] - t * kTile});
                      state.softmax(weights, scale);
                      add_weighted<Dims, Dims>(weights, keys + Tiles::kKeyElements, 0, state.acc);
                    });

  float total[2], inverse[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) total[i] = row_all(state.sum[i], AddOp()), inverse[i] = __fdiv_rn(1.0f, total[i]);
  const std::int64_t first_row = block.query_row * s.num_heads + first_head;  // of [T, N]
  write_rows<Dims>(state.acc, inverse, 0, H, [&](int i) {
    return r + 8 * i < queries.rows ? static_cast<bfloat16*>(p.out) + first_row * H +
                                          queries.offset(r + 8 * i, static_cast<int>(s.num_heads) * H, H)
                                    : nullptr;
  });
  if (p.lse == nullptr || lane_column() != 0) return;
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (r + 8 * i < queries.rows)
      p.lse[first_row + queries.offset(r + 8 * i, static_cast<int>(s.num_heads), 1)] =
          __fmul_rn(kLn2, __fadd_rn(__fmul_rn(state.max[i], scale), log2f(total[i])));
}

template <int Dims, int Warps, class Tiles>
cudaError_t launch(const AttentionCudaArgs& p, cudaStream_t stream) {
  const int elements = kStages * (Tiles::kKeyElements + kTile * kStride<Dims>)+Warps * kStrip * kStride<Dims>;
  const int bytes = elements * static_cast<int>(sizeof(bfloat16));
  const auto kernel = forward_kernel<Dims, Warps, Tiles>;
  if (const auto status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      status != cudaSuccess)
    return status;
  const dim3 grid(static_cast<unsigned>(p.num_blocks), static_cast<unsigned>(p.shape.num_kv_heads));
  kernel<<<grid, Warps * 32, bytes, stream>>>(p);
  return cudaGetLastError();
}

template <int Dims, int Warps>
cudaError_t launch_tiles(const AttentionCudaArgs& p, cudaStream_t stream) {
  return p.cache == nullptr ? launch<Dims, Warps, PackedTiles<Warps * 32, Dims>>(p, stream)
                            : launch<Dims, Warps, CachedTiles<Warps * 32, Dims>>(p, stream);
}

template <int Dims>
cudaError_t launch_rows(const AttentionCudaArgs& p, AttentionRows rows, cudaStream_t stream) {
  constexpr int kMostWarps = Dims <= 128 ? 4 : 2;
  return rows == AttentionRows::few ? launch_tiles<Dims, 1>(p, stream) : launch_tiles<Dims, kMostWarps>(p, stream);
}

}  // namespace

cudaError_t attention_forward_mma_launch(const AttentionCudaArgs& p, AttentionRows rows, cudaStream_t stream) {
  if (p.shape.head_dim <= 64) return launch_rows<64>(p, rows, stream);
  return p.shape.head_dim <= 128 ? launch_rows<128>(p, rows, stream) : launch_rows<256>(p, rows, stream);
}

}  // namespace nemo_rl::kernels
