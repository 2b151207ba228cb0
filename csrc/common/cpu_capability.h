// Which instructions the CPU kernels use, decided once at load. A kernel is compiled in variants, each for some
// features of a processor (cmake/kernels.cmake). It lists the variants that it has; the first whose features are all
// there is taken, and one function pointer stands for all of them.
#pragma once
#include <cstddef>

namespace nemo_rl {

/// What a variant may need. Sets of features are sums of them.
enum CpuFeature : unsigned {
  kAvx2 = 1,           ///< AVX2 and FMA
  kAvx512 = 2,         ///< AVX-512 F, BW, DQ and VL
  kPairs = 4,          ///< AVX-512's products of pairs of bfloat16
  kAmxTiles = 8,       ///< AMX's tiles of bfloat16, which the system must grant
  kSoftwareTiles = 16  ///< the same tiles in software, for tests: no feature of a processor, but what is asked for
};

/// The features that this process uses: those of the machine, lowered by ATEN_CPU_CAPABILITY=default|avx2|avx512
/// (torch's own variable) or NEMO_RL_CPU_CAPABILITY=base|avx2|avx512|avx512_bf16. Tiles in software have to be asked
/// for: =software_tiles, with the vectors that AMX's kernels use where the machine has AVX-512. Tiles form the forward
/// products of bfloat16 in an order of their own (SumOrder::tiles), and a process uses them for all rows, in generation
/// and training.
unsigned cpu_features();

/// Whether the processor has AMX's tiles of bfloat16 and the system lets this process use them. The system grants them
/// for the whole process, once. It refuses where it does not know them or where a thread's signal stack is too small.
bool amx_is_granted();

/// The most demanding name of kernels::needs whose features are used: "avx2", "amx", ...
const char* cpu_capability_name();

namespace kernels {

/// The features that each variant's files are compiled for.
namespace needs {
inline constexpr unsigned base = 0, avx2 = kAvx2, avx512 = avx2 | kAvx512, avx512_bf16 = avx512 | kPairs,
                          software_tiles = avx2 | kSoftwareTiles, software_tiles_avx512 = avx512 | kSoftwareTiles,
                          amx = avx512_bf16 | kAmxTiles;
}  // namespace needs

template <class F>
struct KernelVariant {
  unsigned needs;
  F* kernel;
};

/// The first of the listed variants whose needs are among the features. The last needs none.
template <class F, std::size_t n>
F* select_variant(const KernelVariant<F> (&variants)[n], unsigned features) {
  for (const auto& variant : variants)
    if ((variant.needs & ~features) == 0) return variant.kernel;
  return nullptr;
}

}  // namespace kernels
}  // namespace nemo_rl

// What a header of kernels/ declares of a kernel; `Signature` is a function type. csrc/kernels/cpu/<file>.cpp defines
// `name` in namespace nemo_rl::kernels::NRL_CAPABILITY. Callers call nemo_rl::kernels::name(...).
//   NRL_DECLARE_CPU_KERNEL(name, Signature)    base, avx2, avx512
//   NRL_DECLARE_PAIR_KERNEL(name, Signature)   and avx512_bf16: a kernel that multiplies pairs of bfloat16 where it can
//   NRL_DECLARE_TILE_KERNEL(name, Signature)   and software_tiles, software_tiles_avx512, amx: csrc/kernels/tiles/*.cpp
//                                              define it as well
#if defined(NRL_CAPABILITY)  // inside a kernel file: no static initialiser may be compiled with its instruction set
#define NRL_DECLARE_CPU_KERNEL(name, ...) \
  namespace NRL_CAPABILITY {              \
  __VA_ARGS__ name;                       \
  }                                       \
  static_assert(true)
#define NRL_DECLARE_PAIR_KERNEL NRL_DECLARE_CPU_KERNEL
#define NRL_DECLARE_TILE_KERNEL NRL_DECLARE_CPU_KERNEL
#elif defined(__x86_64__)
#define NRL_VARIANT(variant, name) {needs::variant, variant::name}
#define NRL_SELECT(Signature, ...) \
  ::nemo_rl::kernels::select_variant<Signature>({__VA_ARGS__}, ::nemo_rl::cpu_features())
#define NRL_DECLARE_VARIANT(variant, name, ...) \
  namespace variant {                           \
  __VA_ARGS__ name;                             \
  }
#define NRL_DECLARE_CPU_KERNEL(name, ...)        \
  NRL_DECLARE_VARIANT(base, name, __VA_ARGS__)   \
  NRL_DECLARE_VARIANT(avx2, name, __VA_ARGS__)   \
  NRL_DECLARE_VARIANT(avx512, name, __VA_ARGS__) \
  inline auto* const name =                      \
      NRL_SELECT(decltype(base::name), NRL_VARIANT(avx512, name), NRL_VARIANT(avx2, name), NRL_VARIANT(base, name))
#define NRL_DECLARE_PAIR_KERNEL(name, ...)                                                   \
  NRL_DECLARE_VARIANT(base, name, __VA_ARGS__)                                               \
  NRL_DECLARE_VARIANT(avx2, name, __VA_ARGS__)                                               \
  NRL_DECLARE_VARIANT(avx512, name, __VA_ARGS__)                                             \
  NRL_DECLARE_VARIANT(avx512_bf16, name, __VA_ARGS__)                                        \
  inline auto* const name = NRL_SELECT(decltype(base::name), NRL_VARIANT(avx512_bf16, name), \
                                       NRL_VARIANT(avx512, name), NRL_VARIANT(avx2, name), NRL_VARIANT(base, name))
#define NRL_DECLARE_TILE_KERNEL(name, ...)                                                                     \
  NRL_DECLARE_VARIANT(base, name, __VA_ARGS__)                                                                 \
  NRL_DECLARE_VARIANT(avx2, name, __VA_ARGS__)                                                                 \
  NRL_DECLARE_VARIANT(avx512, name, __VA_ARGS__)                                                               \
  NRL_DECLARE_VARIANT(avx512_bf16, name, __VA_ARGS__)                                                          \
  NRL_DECLARE_VARIANT(software_tiles, name, __VA_ARGS__)                                                       \
  NRL_DECLARE_VARIANT(software_tiles_avx512, name, __VA_ARGS__)                                                \
  NRL_DECLARE_VARIANT(amx, name, __VA_ARGS__)                                                                  \
  inline auto* const name =                                                                                    \
      NRL_SELECT(decltype(base::name), NRL_VARIANT(amx, name), NRL_VARIANT(software_tiles_avx512, name),       \
                 NRL_VARIANT(software_tiles, name), NRL_VARIANT(avx512_bf16, name), NRL_VARIANT(avx512, name), \
                 NRL_VARIANT(avx2, name), NRL_VARIANT(base, name))
#else
#define NRL_DECLARE_CPU_KERNEL(name, ...) \
  namespace base {                        \
  __VA_ARGS__ name;                       \
  }                                       \
  inline auto* const name = base::name
#define NRL_DECLARE_PAIR_KERNEL NRL_DECLARE_CPU_KERNEL
#define NRL_DECLARE_TILE_KERNEL NRL_DECLARE_CPU_KERNEL
#endif
