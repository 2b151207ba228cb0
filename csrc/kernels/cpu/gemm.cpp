// The backward products, tile by tile.
#include "kernels/cpu/gemm_panel.h"
#include "kernels/cpu/gemm_store.h"

namespace nemo_rl::kernels::NRL_CAPABILITY {
namespace {

/// sums[kTileM][kTileN] = panel of a · strip of b over `steps` steps.
template <class T>
[[gnu::noinline]] void micro_kernel(const typename Terms<T>::Word* a, const typename Terms<T>::Word* b,
                                    std::int64_t steps, [[maybe_unused]] const typename Terms<T>::Word* ahead,
                                    accumulate_t<T>* sums) {
  using X = Terms<T>;
  using V = typename X::V;
#if defined(__AVX512F__)
  if constexpr (kInRegisterTile<T>) return register_tile<T, kRegisterColumns>(a, b, steps, false, ahead, sums);
#endif
  V acc[kTileM<T>][kVectorsN<T>];
  for (auto& row : acc)
    for (auto& v : row) v = V{};
  for (std::int64_t s = 0; s < steps; ++s, a += kTileM<T>, b += kTileN<T>) {
    V bv[kVectorsN<T>];
    for (int j = 0; j < kVectorsN<T>; ++j) bv[j] = load<V>(b + j * V::kLanes);
#pragma GCC unroll 12
    for (int i = 0; i < kTileM<T>; ++i) {
      V av(a[i]);
      for (int j = 0; j < kVectorsN<T>; ++j) acc[i][j] = X::multiply_add(av, bv[j], acc[i][j]);
    }
  }
  for (int i = 0; i < kTileM<T>; ++i)
    for (int j = 0; j < kVectorsN<T>; ++j) store(sums + i * kTileN<T> + j * V::kLanes, acc[i][j]);
}

template <class T, class O>
void gemm(const GemmArgs<T, O>& args, const GemmTile& tile) {
  const GemmInput<T>& p = args.input;
  using Word = typename Terms<T>::Word;
  const Block<T> block(p.K, tile.k0);
  const std::int64_t m1 = tile.m1;
  auto* const panels = static_cast<Word*>(tile.packed_a);
  if (!tile.is_packed) pack_a(p, tile.k0, tile.m0, m1, panels);
  for (std::int64_t n = tile.n0; n < tile.n1; n += kTileN<T>)
    for (std::int64_t m = tile.m0; m < m1; m += kTileM<T>) {
      const BlockSums<T, O> to{args.c + m * args.ldc + n,
                               args.ldc,
                               args.sums ? args.sums + m * p.N + n : nullptr,
                               p.N,
                               tile.k0 == 0,
                               tile.k0 + block.terms == p.K,
                               args.accumulate};
      const std::int64_t panel = (m - tile.m0) / kTileM<T>;
      const auto* const strip = static_cast<const Word*>(p.packed_b) + n * block.steps;
      const auto* const ahead =
          strip + kTileN<T> * block.steps + panel * (block.steps / 4 * 16);  // each panel asks for its share
      alignas(64) accumulate_t<T> sums[kTileM<T> * kTileN<T>];
      for (int i = 0; i < kTileM<T> && m + i < m1; ++i)
        for (int j = 0; j < kTileN<T>; j += 64 / static_cast<int>(sizeof(O)))
          __builtin_prefetch(to.c + i * to.ldc + j, 1, 2);
      micro_kernel<T>(panels + panel * panel_size<T>(block.steps), strip, block.steps, ahead, sums);
      const int rows = static_cast<int>(smaller<std::int64_t>(kTileM<T>, m1 - m)),
                cols = static_cast<int>(smaller<std::int64_t>(kTileN<T>, tile.n1 - n));
      for (int i = 0; i < rows; ++i) {
        if (cols == kTileN<T>) {
          to.store(i, sums + i * kTileN<T>, kTileN<T>);  // a known length: whole vectors
        } else {
          to.store(i, sums + i * kTileN<T>, cols);
        }
      }
    }
}

template <class T>
void pack(const GemmInput<T>& p, std::int64_t k0, std::int64_t begin, std::int64_t end) {
  for (std::int64_t unit = begin; unit < end; ++unit) pack_b(p, k0, unit * kGemmPackTerms);
}

}  // namespace

std::int64_t gemm_rows_bf16() { return kGemmTileM; }

void gemm_pack_f32(const GemmInput<float>& p, std::int64_t k0, std::int64_t b, std::int64_t e) { pack(p, k0, b, e); }
void gemm_pack_f64(const GemmInput<double>& p, std::int64_t k0, std::int64_t b, std::int64_t e) { pack(p, k0, b, e); }
void gemm_pack_bf16(const GemmInput<bfloat16>& p, std::int64_t k0, std::int64_t b, std::int64_t e) {
  pack(p, k0, b, e);
}
void gemm_f32(const GemmArgs<float, float>& p, const GemmTile& tile) { gemm(p, tile); }
void gemm_f64(const GemmArgs<double, double>& p, const GemmTile& tile) { gemm(p, tile); }
void gemm_bf16(const GemmArgs<bfloat16, bfloat16>& p, const GemmTile& tile) { gemm(p, tile); }
void gemm_bf16_f32(const GemmArgs<bfloat16, float>& p, const GemmTile& tile) { gemm(p, tile); }

}  // namespace nemo_rl::kernels::NRL_CAPABILITY
