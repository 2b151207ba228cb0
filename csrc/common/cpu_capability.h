// Which instruction set the CPU kernels use, decided once at load. Each kernel is compiled for every capability
// (cmake/kernels.cmake); NRL_DECLARE_CPU_KERNEL makes one function pointer of them.
#pragma once

namespace nemo_rl {

enum class CpuCapability { base = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

/// The best set this machine has, lowered by ATEN_CPU_CAPABILITY=default|avx2|avx512 (torch's own variable) or
/// NEMO_RL_CPU_CAPABILITY=base|avx2|avx512|avx512_bf16.
CpuCapability cpu_capability();

const char* cpu_capability_name();

}  // namespace nemo_rl

// NRL_DECLARE_CPU_KERNEL(name, Signature): `Signature` is a function type. Every csrc/kernels/cpu/*.cpp defines
// `name` in namespace nemo_rl::kernels::NRL_CAPABILITY. Callers call nemo_rl::kernels::name(...).
#if defined(NRL_CAPABILITY)  // inside a kernel file: no static initialiser may be compiled with its instruction set
#define NRL_DECLARE_CPU_KERNEL(name, ...) \
  namespace NRL_CAPABILITY {              \
  __VA_ARGS__ name;                       \
  }                                       \
  static_assert(true)
#elif defined(__x86_64__)
#define NRL_DECLARE_CPU_KERNEL(name, ...) \
  namespace base {                        \
  __VA_ARGS__ name;                       \
  }                                       \
  namespace avx2 {                        \
  __VA_ARGS__ name;                       \
  }                                       \
  namespace avx512 {                      \
  __VA_ARGS__ name;                       \
  }                                       \
  namespace avx512_bf16 {                 \
  __VA_ARGS__ name;                       \
  }                                       \
  inline auto* const name =               \
      ::nemo_rl::kernels::select_kernel<__VA_ARGS__>(base::name, avx2::name, avx512::name, avx512_bf16::name)
#else
#define NRL_DECLARE_CPU_KERNEL(name, ...) \
  namespace base {                        \
  __VA_ARGS__ name;                       \
  }                                       \
  inline auto* const name = base::name
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

}  // namespace nemo_rl::kernels
