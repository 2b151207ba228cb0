#include "common/cpu_capability.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nemo_rl {
namespace {

CpuCapability detect() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  auto best = CpuCapability::base;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = CpuCapability::avx2;
  if (best == CpuCapability::avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    best = CpuCapability::avx512;
  if (best == CpuCapability::avx512 && __builtin_cpu_supports("avx512bf16")) best = CpuCapability::avx512_bf16;
  return best;
#else
  return CpuCapability::base;
#endif
}

std::string asked(const char* variable) {
  const char* text = std::getenv(variable);
  return text ? text : "";
}

CpuCapability limit(const std::string& value) {
  if (value == "default" || value == "base") return CpuCapability::base;
  if (value == "avx2" || value == "software_tiles") return CpuCapability::avx2;
  if (value == "avx512") return CpuCapability::avx512;
  return CpuCapability::avx512_bf16;
}

TileProducts choose_tiles() {
  const std::string value = asked("NEMO_RL_CPU_CAPABILITY");
  if (value == "software_tiles" && cpu_capability() == CpuCapability::avx2) return TileProducts::software;
  if (value == "amx" && cpu_capability() == CpuCapability::avx512_bf16 && amx_is_granted()) return TileProducts::amx;
  return TileProducts::none;
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

CpuCapability cpu_capability() {
  static const CpuCapability chosen =
      std::min({detect(), limit(asked("ATEN_CPU_CAPABILITY")), limit(asked("NEMO_RL_CPU_CAPABILITY"))});
  return chosen;
}

TileProducts tile_products() {
  static const TileProducts chosen = choose_tiles();
  return chosen;
}

const char* cpu_capability_name() {
  if (tile_products() == TileProducts::amx) return "amx";
  if (tile_products() == TileProducts::software) return "software_tiles";
  switch (cpu_capability()) {
    case CpuCapability::avx512_bf16:
      return "avx512_bf16";
    case CpuCapability::avx512:
      return "avx512";
    case CpuCapability::avx2:
      return "avx2";
    default:
      return "base";
  }
}

}  // namespace nemo_rl
