// One backward product on LibTorch's threads, for every op that needs one.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

#include "kernels/gemm.h"
#include "ops/parallel_items.h"

namespace nemo_rl::ops {

inline auto* gemm_pack_of(const kernels::GemmInput<float>&) { return kernels::gemm_pack_f32; }
inline auto* gemm_pack_of(const kernels::GemmInput<double>&) { return kernels::gemm_pack_f64; }
inline auto* gemm_pack_of(const kernels::GemmInput<bfloat16>&) { return kernels::gemm_pack_bf16; }
inline auto* gemm_of(const kernels::GemmArgs<float, float>&) { return kernels::gemm_f32; }
inline auto* gemm_of(const kernels::GemmArgs<double, double>&) { return kernels::gemm_f64; }
inline auto* gemm_of(const kernels::GemmArgs<bfloat16, bfloat16>&) { return kernels::gemm_bf16; }
inline auto* gemm_of(const kernels::GemmArgs<bfloat16, float>&) { return kernels::gemm_bf16_f32; }

/// A thread's packed rows of a, and which ones they are.
class PackedRows {
 public:
  void* memory(std::size_t bytes) { return memory_.get(bytes); }
  /// Whether the rows are this chunk's of this block; from now on they are.
  bool are(std::uint64_t block, std::int64_t chunk) {
    const bool same = block == block_ && chunk == chunk_;
    block_ = block, chunk_ = chunk;
    return same;
  }

 private:
  ScratchMemory memory_;
  std::uint64_t block_ = 0;
  std::int64_t chunk_ = -1;
};

/// Multiplies the block of terms that begins at k0. A tile is some columns of a chunk of rows; tiles go through a chunk's columns, then
/// chunk by chunk, so that a thread packs a chunk once and multiplies it as often as its tiles ask for.
template <class T, class O>
void multiply_block(const kernels::GemmArgs<T, O>& args, std::int64_t k0) {
  using namespace kernels;
  static std::atomic<std::uint64_t> blocks{0};
  const std::uint64_t block = ++blocks;
  const std::int64_t M = args.input.M, N = args.input.N, terms = std::min(kGemmTerms, args.input.K - k0);
  const std::int64_t chunks = (M + kGemmTileM - 1) / kGemmTileM, strips = (N + kGemmTileN - 1) / kGemmTileN;
  const std::int64_t at_least = std::max<std::int64_t>(2, tiles_at_least(terms * kGemmTileN * std::min(M, kGemmTileM)));
  parallel_tiles(chunks * strips, at_least, [&](std::int64_t begin, std::int64_t end, bool) {
    thread_local PackedRows rows;
    void* const packed_a = rows.memory(static_cast<std::size_t>(gemm_packed_bytes(kGemmTileM, args.input.K, sizeof(T))));
    while (begin < end) {
      const std::int64_t chunk = begin / strips, last = std::min(end, (chunk + 1) * strips);
      gemm_of(args)(args, {chunk * kGemmTileM, begin % strips * kGemmTileN, std::min(N, (last - chunk * strips) * kGemmTileN), k0, packed_a,
                           rows.are(block, chunk)});
      begin = last;
    }
  });
}

/// c (+)= a · b; `packed_b` and `sums` are set here.
template <class T, class O>
void run_gemm(kernels::GemmArgs<T, O> args) {
  auto& input = args.input;
  const std::int64_t packed = kernels::gemm_packed_bytes(input.N, input.K, sizeof(T));
  const bool keeps_sums = sizeof(O) < sizeof(accumulate_t<T>) && input.K > kernels::kGemmTerms;
  const std::int64_t sums = keeps_sums ? input.M * input.N * static_cast<std::int64_t>(sizeof(accumulate_t<T>)) : 0;
  std::byte* const memory = thread_workspace(static_cast<std::size_t>(packed + sums));
  input.packed_b = memory;
  if (keeps_sums) args.sums = reinterpret_cast<accumulate_t<T>*>(memory + packed);
  for (std::int64_t k0 = 0; k0 < input.K; k0 += kernels::kGemmTerms) {
    const std::int64_t units = (input.N + kernels::kGemmPackN - 1) / kernels::kGemmPackN;
    parallel_items(units, units > 1, [&](std::int64_t unit) { gemm_pack_of(input)(input, k0, unit, unit + 1); });
    multiply_block(args, k0);
  }
}

}  // namespace nemo_rl::ops
