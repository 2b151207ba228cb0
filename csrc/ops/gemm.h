// One backward product on LibTorch's threads, for every op that needs one.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "kernels/gemm.h"
#include "runtime/parallel_items.h"

namespace nemo_rl::ops {

inline auto* gemm_pack_of(const kernels::GemmInput<float>&) { return kernels::gemm_pack_f32; }
inline auto* gemm_pack_of(const kernels::GemmInput<double>&) { return kernels::gemm_pack_f64; }
inline auto* gemm_pack_of(const kernels::GemmInput<bfloat16>&) { return kernels::gemm_pack_bf16; }
inline auto* gemm_of(const kernels::GemmArgs<float, float>&) { return kernels::gemm_f32; }
inline auto* gemm_of(const kernels::GemmArgs<double, double>&) { return kernels::gemm_f64; }
inline auto* gemm_of(const kernels::GemmArgs<bfloat16, bfloat16>&) { return kernels::gemm_bf16; }
inline auto* gemm_of(const kernels::GemmArgs<bfloat16, float>&) { return kernels::gemm_bf16_f32; }

template <class T>
std::int64_t gemm_rows() {
  if constexpr (std::is_same_v<T, bfloat16>) return kernels::gemm_rows_bf16();
  return kernels::kGemmTileM;
}

/// This thread's room for packed rows of the first operand.
inline void* packed_rows_room(std::size_t bytes) {
  thread_local runtime::ScratchMemory memory;
  return memory.get(bytes);
}

/// Some strips of a chunk of rows, and the place of the thread's packed rows. `more`: the thread will most likely
/// continue with the following strips.
struct ChunkTile {
  std::int64_t chunk, strip_begin, strip_end;
  void* packed_rows;
  bool is_packed, more;
};

/// Calls f(ChunkTile) for all strips of all chunks. The order is strip by strip within a chunk, then chunk by chunk. So
/// a thread packs a chunk's rows (of so many bytes) once and multiplies them for all of its tiles.
template <class F>
void parallel_chunks(std::int64_t chunks, std::int64_t strips, std::int64_t at_least, std::size_t bytes, const F& f) {
  struct Packed {
    std::int64_t chunk = -1;  ///< whose rows lie in this worker's room
  };
  runtime::parallel_tiles_with<Packed>(
      chunks * strips, at_least, [&](Packed& mine, std::int64_t begin, std::int64_t end, bool more) {
        void* const room = packed_rows_room(bytes);
        while (begin < end) {
          const std::int64_t chunk = begin / strips, last = std::min(end, (chunk + 1) * strips);
          const bool is_packed = std::exchange(mine.chunk, chunk) == chunk;
          f(ChunkTile{chunk, begin % strips, last - chunk * strips, room, is_packed, more || last < end});
          begin = last;
        }
      });
}

/// Multiplies the block of terms that begins at k0.
template <class T, class O>
void multiply_block(const kernels::GemmArgs<T, O>& args, std::int64_t k0) {
  using namespace kernels;
  const std::int64_t M = args.input.M, N = args.input.N, terms = std::min(kGemmTerms, args.input.K - k0);
  const std::int64_t rows = gemm_rows<T>(), chunks = (M + rows - 1) / rows, strips = (N + kGemmTileN - 1) / kGemmTileN;
  const std::int64_t at_least =
      std::max<std::int64_t>(2, runtime::tiles_at_least(terms * kGemmTileN * std::min(M, rows)));
  parallel_chunks(chunks, strips, at_least, static_cast<std::size_t>(gemm_packed_bytes(rows, args.input.K, sizeof(T))),
                  [&](const ChunkTile& t) {
                    gemm_of(args)(args, {t.chunk * rows, std::min(M, (t.chunk + 1) * rows), t.strip_begin * kGemmTileN,
                                         std::min(N, t.strip_end * kGemmTileN), k0, t.packed_rows, t.is_packed});
                  });
}

/// Packs units [begin, end) of the block of terms that begins at k0 from b as it lies.
struct PackRowsOfB {
  template <class T>
  void operator()(const kernels::GemmInput<T>& input, std::int64_t k0, std::int64_t begin, std::int64_t end) const {
    gemm_pack_of(input)(input, k0, begin, end);
  }
};

/// c (+)= a · b; `packed_b` and `sums` are set here. `pack`: as PackRowsOfB.
template <class T, class O, class Pack = PackRowsOfB>
void run_gemm(kernels::GemmArgs<T, O> args, const Pack& pack = {}) {
  auto& input = args.input;
  const std::int64_t packed = kernels::gemm_packed_bytes(input.N, input.K, sizeof(T));
  const bool keeps_sums = sizeof(O) < sizeof(accumulate_t<T>) && input.K > kernels::kGemmTerms;
  const std::int64_t sums = keeps_sums ? input.M * input.N * static_cast<std::int64_t>(sizeof(accumulate_t<T>)) : 0;
  std::byte* const memory = runtime::thread_workspace(static_cast<std::size_t>(packed + sums));
  input.packed_b = memory;
  if (keeps_sums) args.sums = reinterpret_cast<accumulate_t<T>*>(memory + packed);
  for (std::int64_t k0 = 0; k0 < input.K; k0 += kernels::kGemmTerms) {
    const std::int64_t units =
        (std::min(kernels::kGemmTerms, input.K - k0) + kernels::kGemmPackTerms - 1) / kernels::kGemmPackTerms;
    runtime::parallel_tiles(units, runtime::tiles_at_least(8 * kernels::kGemmPackTerms * input.N),
                            [&](std::int64_t begin, std::int64_t end, bool) { pack(input, k0, begin, end); });
    multiply_block(args, k0);
  }
}

}  // namespace nemo_rl::ops
