#include "common/cpu_capability.h"

#include <algorithm>
#include <cstdlib>
#include <string>

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

CpuCapability limit_from(const char* variable) {
  const char* text = std::getenv(variable);
  const std::string value = text ? text : "";
  if (value == "default" || value == "base") return CpuCapability::base;
  if (value == "avx2") return CpuCapability::avx2;
  if (value == "avx512") return CpuCapability::avx512;
  return CpuCapability::avx512_bf16;
}

}  // namespace

CpuCapability cpu_capability() {
  static const CpuCapability chosen =
      std::min({detect(), limit_from("ATEN_CPU_CAPABILITY"), limit_from("NEMO_RL_CPU_CAPABILITY")});
  return chosen;
}

const char* cpu_capability_name() {
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
