// Causal attention in bfloat16 on tensor cores, backward, without atomics: one kernel goes over the keys of each block
// of queries and writes their gradients, one goes over the queries of each block of keys (its own sequence's, then
// those that share it) and writes theirs. With P = exp(s - lse) and dS = P (d_out v^T - d_out . out): d_q = c dS k, d_k
// = c dS^T q, d_v = P^T d_out.
#include "kernels/cuda/attention_mma.cuh"

namespace nemo_rl::kernels {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * 32;

/// How a head of at most Dims values is cut. Of large heads, two warps have the same strip and sum half of the columns
/// each.
template <int Dims>
struct Cut {
  static constexpr int kStages = Dims <= 128 ? 2 : 1, kHalves = Dims <= 128 ? 1 : 2;
  static constexpr int kColumns = Dims / kHalves, kRows = kWarps / kHalves * kStrip;
  static constexpr int kTileElements = kTile * kStride<Dims>;
};

/// A block of queries, the heads of one kv head: where its rows lie in qkv, in d_out, and in [T, N].
struct Queries : QueryRows {
  int H, qkv_stride, num_heads;
  const bfloat16 *q, *d_out;
  const float *lse, *dots;
  __device__ Queries(const AttentionBackwardCudaArgs& p, std::int64_t token, std::int64_t tokens, std::int64_t kv_head)
      : QueryRows(tokens, p.shape.group()),
        H(static_cast<int>(p.shape.head_dim)),
        qkv_stride(static_cast<int>(p.shape.row_stride())),
        num_heads(static_cast<int>(p.shape.num_heads)) {
    const std::int64_t first_head = kv_head * p.shape.group(), row = token * num_heads + first_head;
    q = static_cast<const bfloat16*>(p.qkv) + token * qkv_stride + first_head * H;
    d_out = static_cast<const bfloat16*>(p.d_out) + row * H;
    lse = p.lse + row, dots = p.dots + row;
  }
  template <int Rows, int Dims>
  __device__ __forceinline__ void copy(bfloat16* to_q, bfloat16* to_d_out) const {
    for_eights<kThreads, Rows, Dims>([&](int r, int h) {
      const bool present = r < rows && h < H;
      const int at = present ? r : 0, column = present ? h : 0;
      copy_async<16>(to_q + r * kStride<Dims> + h, q + offset(at, qkv_stride, H) + column, present);
      copy_async<16>(to_d_out + r * kStride<Dims> + h, d_out + offset(at, num_heads * H, H) + column, present);
    });
  }
};

/// s: scores become weights P, zero where not seen; d: d_out . v becomes dS. Either the strip's rows or the tile's are
/// the queries.
template <class Lse, class Dot, class Seen>
__device__ __forceinline__ void weights(Scores& s, Scores& d, float scale2, Softcap softcap, const Lse& lse,
                                        const Dot& dot, const Seen& seen) {
#pragma unroll
  for (int n = 0; n < kTile / 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = e / 2, column = 8 * n + lane_column() + e % 2;
      float slope = 1;
      if (softcap.out > 0) {
        const float t = tanhf(s[n][e] * softcap.in);
        s[n][e] = t * softcap.out, slope = 1 - t * t;
      }
      const float p = power_of_2(s[n][e] * scale2 - lse(i, column) * kLog2E);
      s[n][e] = seen(i, column) ? p : 0.0f;
      d[n][e] = s[n][e] * (d[n][e] - dot(i, column)) * slope;
    }
}

/// Gradients of the queries of one block.
template <int Dims>
__global__ void __launch_bounds__(kThreads) queries_kernel(AttentionBackwardCudaArgs p) {
  extern __shared__ __align__(16) uint4 shared[];
  using C = Cut<Dims>;
  const AttentionShape& s = p.shape;
  const AttentionBlock block = p.blocks[blockIdx.x];
  const std::int64_t kv_head = blockIdx.y;
  const int warp = static_cast<int>(threadIdx.x / 32), strip = warp / C::kHalves * kStrip,
            first = warp % C::kHalves * C::kColumns;
  bfloat16* const q = reinterpret_cast<bfloat16*>(shared);
  bfloat16* const d_out = q + C::kRows * kStride<Dims>;
  bfloat16* const stages = d_out + C::kRows * kStride<Dims>;
  const Queries queries(p, block.query_row, block.tokens, kv_head);
  queries.copy<C::kRows, Dims>(q, d_out);

  const int r = strip + lane_row();
  float lse[2], dot[2];
  int keys_of_row[2], first_of_row[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = r + 8 * i < queries.rows ? queries.offset(r + 8 * i, queries.num_heads, 1) : 0;
    lse[i] = queries.lse[at], dot[i] = queries.dots[at];
    keys_of_row[i] = static_cast<int>(block.position) + queries.token(r + 8 * i) + 1;
    first_of_row[i] = static_cast<int>(s.first_key(keys_of_row[i] - 1));
  }
  const float scale2 = static_cast<float>(s.scale * 1.44269504088896340736);
  const bfloat16* const first_key = static_cast<const bfloat16*>(p.qkv) + (s.num_heads + kv_head) * s.head_dim;
  const KeyRows keys_of(block);
  float d_q[C::kColumns / 8][4] = {};
  const int first_tile = static_cast<int>(s.first_key(block.position)) / kTile;
  pipeline<C::kStages>(
      (keys_of.count - 1) / kTile + 1 - first_tile,
      [&](int t, int stage) {
        bfloat16* const keys = stages + stage * 2 * C::kTileElements;
        keys_of.copy<kThreads, Dims>(s, first_key, (first_tile + t) * kTile, keys, keys + C::kTileElements);
      },
      [&](int step, int stage) {
        const int t = first_tile + step;
        if (strip >= queries.rows) return;  // the whole warp
        const bfloat16* const keys = stages + stage * 2 * C::kTileElements;
        Scores weight, d_score;
        scores<Dims>(SharedStrip<Dims>{q + strip * kStride<Dims>}, TileRows<Dims>{keys}, weight);
        scores<Dims>(SharedStrip<Dims>{d_out + strip * kStride<Dims>}, TileRows<Dims>{keys + C::kTileElements},
                     d_score);
        weights(
            weight, d_score, scale2, Softcap(s), [&](int i, int) { return lse[i]; }, [&](int i, int) { return dot[i]; },
            [&](int i, int j) { return t * kTile + j < keys_of_row[i] && t * kTile + j >= first_of_row[i]; });
        add_weighted<Dims, C::kColumns>(d_score, keys, first, d_q);
      });
  const float scale[2] = {static_cast<float>(s.scale), static_cast<float>(s.scale)};
  bfloat16* const to = static_cast<bfloat16*>(p.d_qkv) + (queries.q - static_cast<const bfloat16*>(p.qkv));
  write_rows<C::kColumns>(d_q, scale, first, queries.H, [&](int i) {
    return r + 8 * i < queries.rows ? to + queries.offset(r + 8 * i, queries.qkv_stride, queries.H) : nullptr;
  });
}

/// Gradients of a block of keys and their values: a warp sums those of 16 keys.
template <int Dims>
struct KeyBlock {
  using C = Cut<Dims>;
  static constexpr int kFloats = 2 * kTile;  // of a tile of queries: lse and dots
  static constexpr int kStage = 2 * C::kTileElements + kFloats * 2;
  const AttentionBackwardCudaArgs& p;
  std::int64_t kv_head;
  bfloat16 *keys, *values, *stages;
  int strip, first;
  float d_keys[C::kColumns / 8][4] = {}, d_values[C::kColumns / 8][4] = {};

  __device__ KeyBlock(const AttentionBackwardCudaArgs& args, std::int64_t head, bfloat16* shared)
      : p(args),
        kv_head(head),
        keys(shared),
        values(keys + C::kRows * kStride<Dims>),
        stages(values + C::kRows * kStride<Dims>),
        strip(static_cast<int>(threadIdx.x / 32) / C::kHalves * kStrip),
        first(static_cast<int>(threadIdx.x / 32) % C::kHalves * C::kColumns) {}

  __device__ static float* lse_of(bfloat16* stage) { return reinterpret_cast<float*>(stage + 2 * C::kTileElements); }

  /// Adds what query tokens [begin, end) of a sequence (own rows from `start` on) give; seeing(token, j): of the tokens
  /// from that one on, the first that sees key j, and the first behind it that does not.
  struct Seeing {
    std::int64_t first, end;
  };
  template <class F>
  __device__ void add(std::int64_t start, std::int64_t begin, std::int64_t end, const F& seeing) {
    const std::int64_t step = kTile / p.shape.group();
    const float scale2 = static_cast<float>(p.shape.scale * 1.44269504088896340736);
    const auto tokens_of = [&](int t) { return end - begin - t * step < step ? end - begin - t * step : step; };
    pipeline<C::kStages>(
        static_cast<int>((end - begin + step - 1) / step),
        [&](int t, int stage) {
          const Queries queries(p, start + begin + t * step, tokens_of(t), kv_head);
          bfloat16* const q = stages + stage * kStage;
          queries.template copy<kTile, Dims>(q, q + C::kTileElements);
          const int i = static_cast<int>(threadIdx.x), row = i % kTile;
          if (i >= kFloats) return;
          const bool present = row < queries.rows;
          copy_async<4>(
              lse_of(q) + i,
              (i < kTile ? queries.lse : queries.dots) + (present ? queries.offset(row, queries.num_heads, 1) : 0),
              present);
        },
        [&](int t, int stage) {
          bfloat16* const q = stages + stage * kStage;
          const float* const lse = lse_of(q);
          const int rows = static_cast<int>(tokens_of(t) * p.shape.group()), key = strip + lane_row();
          const auto row_of = [&](std::int64_t token) {  // a tile has at most kTile of them
            return static_cast<int>((token < 0 ? 0 : token > kTile ? kTile : token) * p.shape.group());
          };
          int first_row[2], end_row[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const Seeing tokens = seeing(begin + t * step, key + 8 * i);
            first_row[i] = row_of(tokens.first), end_row[i] = row_of(tokens.end) < rows ? row_of(tokens.end) : rows;
          }
          Scores weight, d_score;
          scores<Dims>(SharedStrip<Dims>{keys + strip * kStride<Dims>}, TileRows<Dims>{q}, weight);
          scores<Dims>(SharedStrip<Dims>{values + strip * kStride<Dims>}, TileRows<Dims>{q + C::kTileElements},
                       d_score);
          weights(
              weight, d_score, scale2, Softcap(p.shape), [&](int, int r) { return lse[r]; },
              [&](int, int r) { return lse[kTile + r]; },
              [&](int i, int r) { return r >= first_row[i] && r < end_row[i]; });
          add_weighted<Dims, C::kColumns>(weight, q + C::kTileElements, first, d_values);
          add_weighted<Dims, C::kColumns>(d_score, q, first, d_keys);
        });
  }
};

template <int Dims>
__global__ void __launch_bounds__(kThreads) keys_kernel(AttentionBackwardCudaArgs p) {
  extern __shared__ __align__(16) uint4 shared[];
  using C = Cut<Dims>;
  const AttentionShape& s = p.shape;
  const AttentionKeyBlock work = p.key_blocks[blockIdx.x];
  const AttentionSequence sequence = p.sequences[work.sequence];
  const std::int64_t kv_head = blockIdx.y, begin = work.key_begin;
  const int H = static_cast<int>(s.head_dim), stride = static_cast<int>(s.row_stride()),
            to_value = static_cast<int>(s.num_kv_heads) * H;
  const int present_keys = sequence.length - begin < C::kRows ? static_cast<int>(sequence.length - begin) : C::kRows;
  KeyBlock<Dims> block(p, kv_head, reinterpret_cast<bfloat16*>(shared));
  const std::int64_t first_key = (sequence.start + begin) * stride + (s.num_heads + kv_head) * H;
  const bfloat16* const from = static_cast<const bfloat16*>(p.qkv) + first_key;
  for_eights<kThreads, C::kRows, Dims>([&](int j, int h) {
    const bool present = j < present_keys && h < H;
    const int at = present ? j * stride + h : 0;
    copy_async<16>(block.keys + j * kStride<Dims> + h, from + at, present);
    copy_async<16>(block.values + j * kStride<Dims> + h, from + to_value + at, present);
  });
  const std::int64_t window = s.window > 0 ? s.window : std::int64_t{1} << 40;
  const auto end_of = [&](std::int64_t length, std::int64_t tokens) {  // of the queries that see a key of this block
    const std::int64_t end = begin + C::kRows - 1 + window - tokens;
    return end < length ? end : length;
  };
  block.add(sequence.start, begin, end_of(sequence.length, 0), [&](std::int64_t token, int j) {
    return typename KeyBlock<Dims>::Seeing{begin + j - token, begin + j + window - token};
  });
  for (std::int64_t i = work.sharer_begin; i < work.sharer_end; ++i) {
    const AttentionSequence sharer = p.sequences[p.sharers[i]];
    if (sharer.prefix_length > begin)
      block.add(sharer.start, 0, end_of(sharer.length, sharer.prefix_length), [&](std::int64_t token, int j) {
        return typename KeyBlock<Dims>::Seeing{
            0, begin + j < sharer.prefix_length ? begin + j + window - sharer.prefix_length - token : 0};
      });
  }
  bfloat16* const to = static_cast<bfloat16*>(p.d_qkv) + first_key;
  const auto row_of = [&](int i) {
    const int j = block.strip + lane_row() + 8 * i;
    return j < present_keys ? to + j * stride : nullptr;
  };
  const float scale[2] = {static_cast<float>(s.scale), static_cast<float>(s.scale)}, one[2] = {1, 1};
  write_rows<C::kColumns>(block.d_keys, scale, block.first, H, row_of);
  write_rows<C::kColumns>(block.d_values, one, block.first, H,
                          [&](int i) { return row_of(i) == nullptr ? nullptr : row_of(i) + to_value; });
}

template <class Kernel>
cudaError_t launch_kernel(Kernel* kernel, const AttentionBackwardCudaArgs& p, std::int64_t blocks, int elements,
                          cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  const int bytes = elements * static_cast<int>(sizeof(bfloat16));
  if (const auto status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
      status != cudaSuccess)
    return status;
  kernel<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(p.shape.num_kv_heads)), kThreads, bytes, stream>>>(
      p);
  return cudaGetLastError();
}

template <int Dims>
cudaError_t launch(const AttentionBackwardCudaArgs& p, cudaStream_t stream) {
  using C = Cut<Dims>;
  const int strips = 2 * C::kRows * kStride<Dims>;
  if (const auto status =
          launch_kernel(queries_kernel<Dims>, p, p.num_blocks, strips + C::kStages * 2 * C::kTileElements, stream);
      status != cudaSuccess)
    return status;
  return launch_kernel(keys_kernel<Dims>, p, p.num_key_blocks, strips + C::kStages * KeyBlock<Dims>::kStage, stream);
}

}  // namespace

cudaError_t attention_backward_mma_launch(const AttentionBackwardCudaArgs& p, cudaStream_t stream) {
  if (p.shape.head_dim <= 64) return launch<64>(p, stream);
  return p.shape.head_dim <= 128 ? launch<128>(p, stream) : launch<256>(p, stream);
}

}  // namespace nemo_rl::kernels
