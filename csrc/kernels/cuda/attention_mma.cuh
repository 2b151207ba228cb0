// Attention in bfloat16 on tensor cores, what its kernels share: rows on their way into shared memory, and the two
// products that all of them consist of. A warp has a strip of 16 rows (queries, or keys) and meets tiles of 32 others.
// With A its strip and X the tile:
//   scores          S [16, 32] = A X^T       q k^T, d_out v^T, k q^T, v d_out^T
//   add_weighted    C [16, H] += W X         p v, ds k, p^T d_out, ds^T q      W of scores, rounded to bfloat16
// A row of either depends on its own row of A alone, so how rows are put together does not change a bit.
#pragma once
#include "kernels/cuda/attention_launchers.h"
#include "kernels/cuda/tensor_core.cuh"

namespace nemo_rl::kernels {

constexpr int kStrip = 16;  // rows of a warp
static_assert(kTile == 32, "two products of 16 terms");

/// Elements from one row to the next in shared memory: eight rows' 16 bytes lie in different banks.
template <int Width>
constexpr int kStride = Width + 8;

/// A lane's place in a strip: its rows are lane_row() and 8 more, its columns lane_column() and the next of each eight.
__device__ __forceinline__ int lane_row() { return static_cast<int>(threadIdx.x % 32 / 4); }
__device__ __forceinline__ int lane_column() { return static_cast<int>(threadIdx.x % 4 * 2); }

/// Rows of a block of queries: tokens times heads of a group.
struct QueryRows {
  int rows, group, reciprocal;
  __device__ QueryRows(std::int64_t tokens, std::int64_t heads)
      : rows(static_cast<int>(tokens * heads)), group(static_cast<int>(heads)), reciprocal(65536 / group + 1) {}
  __device__ __forceinline__ int token(int r) const { return r * reciprocal >> 16; }  // r / group, exact for r < 256
  /// From the first row to row r, where a token's heads are `head` apart and tokens `stride`.
  __device__ __forceinline__ int offset(int r, int stride, int head) const {
    return token(r) * stride + (r - token(r) * group) * head;
  }
};

// ---------------------------------------------------------------- copies

/// f(r, h) for the thread's share of all eights of Rows rows of Width values: those from h on of row r.
template <int Threads, int Rows, int Width, class F>
__device__ __forceinline__ void for_eights(const F& f) {
  constexpr int kAcross = Width / 8, kStep = Threads / kAcross;
  static_assert(Threads % kAcross == 0 && Rows % kStep == 0);
#pragma unroll
  for (int i = 0; i < Rows / kStep; ++i)
    f(static_cast<int>(threadIdx.x) / kAcross + i * kStep, static_cast<int>(threadIdx.x) % kAcross * 8);
}

/// Rows of packed keys or values, by absolute position.
struct KeyRows {
  std::int64_t prefix_start, own_start;  ///< rows of qkv where positions 0 and prefix_length lie
  int prefix_length, count;
  __device__ explicit KeyRows(const AttentionBlock& b)
      : prefix_start(b.prefix_start),
        own_start(b.own_start - b.prefix_length),
        prefix_length(static_cast<int>(b.prefix_length)),
        count(static_cast<int>(b.position + b.tokens)) {}
  /// Begins to copy the keys and values of positions [begin, begin + kTile); keys: those of row 0.
  template <int Threads, int Dims>
  __device__ __forceinline__ void copy(const AttentionShape& s, const bfloat16* keys, int begin, bfloat16* to_keys,
                                       bfloat16* to_values) const {
    const int H = static_cast<int>(s.head_dim), to_value = static_cast<int>(s.num_kv_heads) * H;
    const std::int64_t stride = s.row_stride();
    for_eights<Threads, kTile, Dims>([&](int j, int h) {
      const int position = begin + j;
      const bool present = position < count && h < H;
      const bfloat16* const from =
          keys + (present ? (position < prefix_length ? prefix_start : own_start) + position : 0) * stride +
          (present ? h : 0);
      copy_async<16>(to_keys + j * kStride<Dims> + h, from, present);
      copy_async<16>(to_values + j * kStride<Dims> + h, from + to_value, present);
    });
  }
};

/// use(t, stage) for t < count, after copy(t, stage) has filled that stage of shared memory; copies run Stages - 1
/// ahead.
template <int Stages, class Copy, class Use>
__device__ __forceinline__ void pipeline(int count, const Copy& copy, const Use& use) {
  for (int t = 0; t < Stages - 1; ++t) {
    if (t < count) copy(t, t % Stages);
    commit_copies();
  }
  for (int t = 0; t < count; ++t) {
    if (const int next = t + Stages - 1; next < count) copy(next, next % Stages);
    commit_copies();
    wait_for_copies<Stages - 1>();
    __syncthreads();  // everyone's copies
    use(t, t % Stages);
    __syncthreads();  // before the next copies go where this tile lies
  }
}

// ---------------------------------------------------------------- products

/// A strip in shared memory as operand `a`, from `rows` on.
template <int Width>
struct SharedStrip {
  const bfloat16* rows;
  __device__ __forceinline__ void operator()(int h, std::uint32_t (&a)[4]) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    load_matrices(rows + lane % 16 * kStride<Width> + h + lane / 16 * 8, a);
  }
};

/// Tile rows [kTile][kStride<Width>] as operand `b` of a product with their transpose: columns are tile rows, 16 from n
/// on.
template <int Width>
struct TileRows {
  const bfloat16* rows;
  __device__ __forceinline__ void operator()(int h, int n, std::uint32_t (&b)[4]) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    load_matrices(rows + (n + lane / 16 * 8 + lane % 8) * kStride<Width> + h + lane / 8 % 2 * 8, b);
  }
};

/// A tile that lies transposed, [h][kStride<kTile>], as the cache's keys do: the same operand.
struct TileColumns {
  const bfloat16* columns;
  __device__ __forceinline__ void operator()(int h, int n, std::uint32_t (&b)[4]) const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    load_matrices_transposed(columns + (h + lane % 16) * kStride<kTile> + n + lane / 16 * 8, b);
  }
};

using Scores = float[kTile / 8][4];  // of a strip and a tile: s[n] are columns 8n on

/// s = strip . tile^T over Dims values, zeros behind a head's own.
template <int Dims, class Strip, class Tile>
__device__ __forceinline__ void scores(const Strip& strip, const Tile& tile, Scores& s) {
#pragma unroll
  for (int n = 0; n < kTile / 8; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
  for (int h = 0; h < Dims; h += 16) {
    std::uint32_t a[4];
    strip(h, a);
#pragma unroll
    for (int n = 0; n < kTile; n += 16) {
      std::uint32_t b[4];
      tile(h, n, b);
      multiply_add(s[n / 8], a, b[0], b[1]);
      multiply_add(s[n / 8 + 1], a, b[2], b[3]);
    }
  }
}

/// sums += weights . the tile's columns [first, first + Columns); sums[n] are those from first + 8n on. `rows`: the
/// tile.
template <int Width, int Columns>
__device__ __forceinline__ void add_weighted(const Scores& weights, const bfloat16* rows, int first,
                                             float (&sums)[Columns / 8][4]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  std::uint32_t a[kTile / 16][4];  // where a lane holds scores of a row is where it holds that row's terms
#pragma unroll
  for (int k = 0; k < kTile / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = weights[2 * k + i / 2] + i % 2 * 2;
      a[k][i] = bfloat16_pair(pair[0], pair[1]);
    }
#pragma unroll
  for (int n = 0; n < Columns; n += 16) {
#pragma unroll
    for (int k = 0; k < kTile / 16; ++k) {
      std::uint32_t b[4];
      load_matrices_transposed(rows + (16 * k + lane % 16) * kStride<Width> + first + n + lane / 16 * 8, b);
      multiply_add(sums[n / 8], a[k], b[0], b[1]);
      multiply_add(sums[n / 8 + 1], a[k], b[2], b[3]);
    }
  }
}

/// Over the four lanes that hold a row.
template <class Op>
__device__ __forceinline__ float row_all(float v, const Op& op) {
  v = op(v, __shfl_xor_sync(0xffffffffu, v, 1));
  return op(v, __shfl_xor_sync(0xffffffffu, v, 2));
}

/// Writes a strip's sums, times `factor` by row, to the rows to(0) and to(1) of this lane, of H values each; nowhere
/// where null.
template <int Columns, class To>
__device__ __forceinline__ void write_rows(const float (&sums)[Columns / 8][4], const float (&factor)[2], int first,
                                           int H, const To& to) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    bfloat16* const row = to(i);
    if (row == nullptr) continue;
#pragma unroll
    for (int n = 0; n < Columns / 8; ++n) {
      if (first + 8 * n >= H) break;
      *reinterpret_cast<std::uint32_t*>(row + first + 8 * n + lane_column()) =
          bfloat16_pair(__fmul_rn(sums[n][2 * i], factor[i]), __fmul_rn(sums[n][2 * i + 1], factor[i]));
    }
  }
}

}  // namespace nemo_rl::kernels
