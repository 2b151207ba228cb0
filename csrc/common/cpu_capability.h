// Which instruction set the CPU kernels use, decided once at load. Each kernel is compiled for every capability
// (cmake/kernels.cmake); NRL_DECLARE_CPU_KERNEL makes one function pointer of them.
#pragma once

namespace nemo_rl {

enum class CpuCapability { base = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

/// The best set this machine has, lowered by ATEN_CPU_CAPABILITY=default|avx2|avx512 (torch's own variable) or
/// NEMO_RL_CPU_CAPABILITY=base|avx2|avx512|avx512_bf16.
CpuCapability cpu_capability();

/// What forms the forward products of bfloat16 where it is not the vector unit: tiles of 16 by 16 sums whose order is
/// that of the instruction TDPBF16PS (kernels/tiles/). A process uses one of them for all rows, in generation and
/// training.
enum class TileProducts { none, software, amx };

/// amx: NEMO_RL_CPU_CAPABILITY=amx on a machine that has it and whose system permits it; otherwise as avx512_bf16.
/// software: NEMO_RL_CPU_CAPABILITY=software_tiles, for tests of the tiles' arithmetic on any machine with AVX2, which
/// the other kernels then use.
TileProducts tile_products();

/// Whether the processor has AMX's tiles of bfloat16 and the system lets this process use them. The system grants them
/// for the whole process, once. It refuses where it does not know them or where a thread's signal stack is too small.
bool amx_is_granted();

/// "avx2", ..., or "amx", "software_tiles".
const char* cpu_capability_name();

}  // namespace nemo_rl

// NRL_DECLARE_CPU_KERNEL(name, Signature): `Signature` is a function type. Every csrc/kernels/cpu/*.cpp defines
// `name` in namespace nemo_rl::kernels::NRL_CAPABILITY. Callers call nemo_rl::kernels::name(...).
// NRL_DECLARE_TILE_KERNEL(name, Signature): the same, and csrc/kernels/tiles/*.cpp define it as well.
#if defined(NRL_CAPABILITY)  // inside a kernel file: no static initialiser may be compiled with its instruction set
#define NRL_DECLARE_CPU_KERNEL(name, ...) \
  namespace NRL_CAPABILITY {              \
  __VA_ARGS__ name;                       \
  }                                       \
  static_assert(true)
#define NRL_DECLARE_TILE_KERNEL NRL_DECLARE_CPU_KERNEL
#elif defined(__x86_64__)
#define NRL_DECLARE_VARIANT(capability, name, ...) \
  namespace capability {                           \
  __VA_ARGS__ name;                                \
  }
#define NRL_DECLARE_VECTOR_VARIANTS(name, ...)   \
  NRL_DECLARE_VARIANT(base, name, __VA_ARGS__)   \
  NRL_DECLARE_VARIANT(avx2, name, __VA_ARGS__)   \
  NRL_DECLARE_VARIANT(avx512, name, __VA_ARGS__) \
  NRL_DECLARE_VARIANT(avx512_bf16, name, __VA_ARGS__)
#define NRL_VECTOR_VARIANT(name, ...) \
  ::nemo_rl::kernels::select_kernel<__VA_ARGS__>(base::name, avx2::name, avx512::name, avx512_bf16::name)
#define NRL_DECLARE_CPU_KERNEL(name, ...)        \
  NRL_DECLARE_VECTOR_VARIANTS(name, __VA_ARGS__) \
  inline auto* const name = NRL_VECTOR_VARIANT(name, __VA_ARGS__)
#define NRL_DECLARE_TILE_KERNEL(name, ...)                                                                             \
  NRL_DECLARE_VECTOR_VARIANTS(name, __VA_ARGS__)                                                                       \
  NRL_DECLARE_VARIANT(software_tiles, name, __VA_ARGS__)                                                               \
  NRL_DECLARE_VARIANT(amx, name, __VA_ARGS__)                                                                          \
  inline auto* const name = ::nemo_rl::kernels::select_tile_kernel<__VA_ARGS__>(NRL_VECTOR_VARIANT(name, __VA_ARGS__), \
                                                                                software_tiles::name, amx::name)
#else
#define NRL_DECLARE_CPU_KERNEL(name, ...) \
  namespace base {                        \
  __VA_ARGS__ name;                       \
  }                                       \
  inline auto* const name = base::name
#define NRL_DECLARE_TILE_KERNEL NRL_DECLARE_CPU_KERNEL
#endif

namespace nemo_rl::kernels {

template <class F>
F* select_kernel(F* base, F* avx2, F* avx512, F* avx512_bf16) {
  switch (cpu_capability()) {
    case CpuCapability::avx512_bf16:
      return avx512_bf16;
    case CpuCapability::avx512:
      return avx512;
    case CpuCapability::avx2:
      return avx2;
    default:
      return base;
  }
}

template <class F>
F* select_tile_kernel(F* vectors, F* software, F* amx) {
  switch (tile_products()) {
    case TileProducts::amx:
      return amx;
    case TileProducts::software:
      return software;
    default:
      return vectors;
  }
}

}  // namespace nemo_rl::kernels
