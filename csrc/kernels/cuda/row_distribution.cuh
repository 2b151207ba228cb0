// The distribution that one row of logits gives under temperature, top-k and top-p, by one thread block; definitions as
// in kernels/sampling.h. Sampler and trainer call these functions, so both get the same bits; a row's result depends on
// that row alone.
#pragma once
#include <cfloat>
#include <cmath>

#include "kernels/cuda/group_reduce.cuh"
#include "kernels/sampling.h"
#include "kernels/token_order.h"

namespace nemo_rl::kernels {

constexpr int kRowThreads = 512;
constexpr int kDigits = 16;  // of the threshold search: four bits a pass

static_assert(kRowThreads / kWarp <= kDigits, "the words of one row also take a number from every warp");
struct RowScratch {
  double doubles[kRowThreads / kWarp];
  float floats[kRowThreads / kWarp];
  std::uint64_t words[kRowThreads / kWarp][kDigits];
};

/// Tokens that a filter keeps: those above `order`, and of those equal to it the ids from `id` on.
struct RowThreshold {
  std::uint32_t order = 0;
  std::int32_t id = 0;
  __device__ __forceinline__ bool keeps(float z, std::int64_t v) const {
    const std::uint32_t o = order_of(z);
    return o > order || (o == order && v >= id);
  }
};

struct Row {
  const float* logits;
  std::int64_t V;
  float inverse;  ///< 1 / temperature
  __device__ __forceinline__ float z(std::int64_t v) const { return logits[v] * inverse; }
};

/// Over the kept tokens. The threads' sums are float32, what they add up to is float64.
template <bool Entropy>
__device__ LogSumExp row_log_sum_exp(const Row& row, const RowThreshold& kept, RowScratch& scratch) {
  float max = -FLT_MAX;  // in place of -inf, as on the CPU: a NaN still shows in the sum
  for (std::int64_t v = threadIdx.x; v < row.V; v += kRowThreads) {
    const float z = row.z(v);
    if (z > max && kept.keeps(z, v)) max = z;
  }
  max = group_all<kRowThreads>(max, MaxOp(), scratch.floats);
  float sum = 0, dot = 0;
  for (std::int64_t v = threadIdx.x; v < row.V; v += kRowThreads) {
    const float z = row.z(v);
    if (!kept.keeps(z, v)) continue;
    const float d = __fsub_rn(z, max), e = expf(d);
    sum = __fadd_rn(sum, e);
    if (Entropy && e > 0) dot = fmaf(e, d, dot);
  }
  const double total = group_all<kRowThreads>(static_cast<double>(sum), AddOp(), scratch.doubles);
  const double log_sum = log(total);
  double entropy = 0;
  if (Entropy) entropy = log_sum - group_all<kRowThreads>(static_cast<double>(dot), AddOp(), scratch.doubles) / total;
  return {max, static_cast<float>(log_sum), static_cast<float>(entropy)};
}

__device__ __forceinline__ bool finite(const LogSumExp& lse) { return isfinite(lse.log_sum); }

/// As kernels/cpu/log_softmax.cpp's.
__device__ __forceinline__ float row_logprob(float z, const LogSumExp& lse) {
  return __fsub_rn(__fsub_rn(z, lse.max), lse.log_sum);
}

/// The sum of f(v) over the row. Integers: no order.
template <class F>
__device__ std::uint64_t row_sum(std::int64_t V, RowScratch& scratch, const F& f) {
  std::uint64_t sum = 0;
  for (std::int64_t v = threadIdx.x; v < V; v += kRowThreads) sum += f(v);
  return group_all<kRowThreads>(sum, AddOp(), scratch.words[0]);
}

/// The largest key for which the weights of all entries at or above it sum to at least `need`; 0 where they never do.
template <class Key, class Weight>
__device__ std::uint32_t highest_key(std::int64_t V, std::uint64_t need, RowScratch& scratch, const Key& key,
                                     const Weight& weight) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  std::uint32_t found = 0;
  for (int shift = 28; shift >= 0; shift -= 4) {
    std::uint64_t sums[kDigits] = {};
    for (std::int64_t v = threadIdx.x; v < V; v += kRowThreads) {
      const std::uint32_t k = key(v);
      if (k < found) continue;
      const std::uint64_t w = weight(v);
#pragma unroll
      for (int d = 1; d < kDigits; ++d)
        if (k - found >= static_cast<std::uint32_t>(d) << shift) sums[d] += w;
    }
#pragma unroll
    for (int d = 1; d < kDigits; ++d) {
      const std::uint64_t sum = warp_all(sums[d], AddOp());
      if (lane == 0) scratch.words[warp][d] = sum;
    }
    __syncthreads();
    std::uint32_t digit = 0;
    for (int d = 1; d < kDigits; ++d) {
      std::uint64_t sum = 0;
      for (int w = 0; w < kRowThreads / kWarp; ++w) sum += scratch.words[w][d];
      if (sum >= need) digit = static_cast<std::uint32_t>(d);
    }
    __syncthreads();
    found += digit << shift;
  }
  return found;
}

/// What top-k and top-p keep of a row whose unfiltered log-sum-exp is `lse` (finite).
__device__ inline RowThreshold row_threshold(const Row& row, const LogSumExp& lse, float top_p, std::int64_t top_k,
                                             RowScratch& scratch) {
  RowThreshold kept;
  const auto order = [&](std::int64_t v) { return order_of(row.z(v)); };
  if (top_k > 0 && top_k < row.V)  // ties with the k-th value stay
    kept.order = highest_key(row.V, static_cast<std::uint64_t>(top_k), scratch, order,
                             [](std::int64_t) { return std::uint64_t{1}; });
  if (!(top_p < 1)) return kept;
  const std::uint32_t least = kept.order;
  const auto mass = [&](std::int64_t v) {
    const float z = row.z(v);
    return order_of(z) >= least ? mass_of(expf(__fsub_rn(z, lse.max))) : std::uint64_t{0};
  };
  const std::uint64_t need = needed_mass(top_p, row_sum(row.V, scratch, mass));
  const std::uint32_t cut = highest_key(row.V, need, scratch, order, mass);
  kept.order = cut;
  // of equal ones as many as it takes, the largest ids first
  const std::uint64_t above =
      row_sum(row.V, scratch, [&](std::int64_t v) { return order(v) > cut ? mass(v) : std::uint64_t{0}; });
  const std::uint64_t ties = row_sum(row.V, scratch, [&](std::int64_t v) { return std::uint64_t{order(v) == cut}; });
  const std::uint64_t tied =
      row_sum(row.V, scratch, [&](std::int64_t v) { return order(v) == cut ? mass(v) : std::uint64_t{0}; });
  const std::uint64_t each = tied / (ties > 0 ? ties : 1), wanted = each > 0 ? (need - above + each - 1) / each : ties;
  if (wanted < ties)
    kept.id = static_cast<std::int32_t>(highest_key(
        row.V, wanted, scratch, [](std::int64_t v) { return static_cast<std::uint32_t>(v); },
        [&](std::int64_t v) { return std::uint64_t{order(v) == cut}; }));
  return kept;
}

/// The token at which the kept tokens' masses, summed in vocabulary order, exceed u of their total.
__device__ inline std::int64_t row_draw(const Row& row, const LogSumExp& lse, const RowThreshold& kept, double u,
                                        RowScratch& scratch) {
  constexpr int kEach = 8;  // neighbouring tokens of a thread
  const auto mass = [&](std::int64_t v) {
    const float z = row.z(v);
    return kept.keeps(z, v) ? mass_of(expf(__fsub_rn(z, lse.max))) : std::uint64_t{0};
  };
  std::uint64_t rest = drawn_mass(u, row_sum(row.V, scratch, mass));
  __shared__ std::int64_t chosen;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (std::int64_t begin = 0; begin < row.V; begin += kRowThreads * kEach) {
    const std::int64_t first = begin + threadIdx.x * std::int64_t{kEach};
    std::uint64_t own = 0;
    for (int i = 0; i < kEach; ++i)
      if (first + i < row.V) own += mass(first + i);
    std::uint64_t up_to = own;  // of the warp's threads up to this one
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const std::uint64_t other = __shfl_up_sync(0xffffffffu, up_to, offset);
      if (lane >= offset) up_to += other;
    }
    if (lane == kWarp - 1) scratch.words[warp][0] = up_to;
    if (threadIdx.x == 0) chosen = -1;
    __syncthreads();
    std::uint64_t before = up_to - own, total = 0;
    for (int w = 0; w < kRowThreads / kWarp; ++w) {
      if (w < warp) before += scratch.words[w][0];
      total += scratch.words[w][0];
    }
    if (before <= rest && rest < before + own)  // one thread of the block at most
      for (int i = 0; i < kEach && first + i < row.V; ++i) {
        before += mass(first + i);
        if (before > rest) {
          chosen = first + i;
          break;
        }
      }
    __syncthreads();
    const std::int64_t found = chosen;
    __syncthreads();  // before `chosen` and the scratch are written again
    if (found >= 0) return found;
    rest -= total;
  }
  return -1;  // cannot be: rest is below the sum of all masses
}

/// The first largest logit.
__device__ inline std::int64_t row_argmax(const Row& row, float max, RowScratch& scratch) {
  double first = static_cast<double>(row.V);  // exact for ids
  for (std::int64_t v = threadIdx.x; v < row.V; v += kRowThreads)
    if (row.z(v) == max) {
      first = static_cast<double>(v);
      break;
    }
  return static_cast<std::int64_t>(group_all<kRowThreads>(first, MinOp(), scratch.doubles));
}

}  // namespace nemo_rl::kernels
