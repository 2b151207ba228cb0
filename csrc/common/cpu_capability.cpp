#include "common/cpu_capability.h"

#include <cstdlib>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nemo_rl {
namespace {

unsigned detected() {
  unsigned features = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) features |= kAvx2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl"))
    features |= kAvx512;
  if (__builtin_cpu_supports("avx512bf16")) features |= kPairs;
#endif
  return features;
}

std::string asked(const char* variable) {
  const char* text = std::getenv(variable);
  return text ? text : "";
}

/// What a value allows of the vector unit.
unsigned vectors_of(const std::string& value) {
  using namespace kernels;
  if (value == "default" || value == "base") return needs::base;
  if (value == "avx2") return needs::avx2;
  if (value == "avx512" || value == "software_tiles") return needs::avx512;
  return needs::avx512_bf16;
}

unsigned choose_features() {
  const std::string value = asked("NEMO_RL_CPU_CAPABILITY");
  unsigned features = detected() & vectors_of(value) & vectors_of(asked("ATEN_CPU_CAPABILITY"));
  if (value == "software_tiles") features |= kSoftwareTiles;
  // the system is asked only where they could be used
  const bool may_use_tiles = (value.empty() || value == "amx") && features == kernels::needs::avx512_bf16;
  if (may_use_tiles && amx_is_granted()) features |= kAmxTiles;
  return features;
}

}  // namespace

bool amx_is_granted() {
#if defined(__x86_64__) && defined(__linux__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & kAmxBf16) || !(edx & kAmxTile)) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

unsigned cpu_features() {
  static const unsigned features = choose_features();
  return features;
}

const char* cpu_capability_name() {
  using namespace kernels;
  return select_variant<const char>({{needs::amx, "amx"},
                                     {needs::software_tiles, "software_tiles"},
                                     {needs::avx512_bf16, "avx512_bf16"},
                                     {needs::avx512, "avx512"},
                                     {needs::avx2, "avx2"},
                                     {needs::base, "base"}},
                                    cpu_features());
}

}  // namespace nemo_rl
