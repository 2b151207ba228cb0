#include "common/large_memory.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nemo_rl {

void advise_huge_pages([[maybe_unused]] void* begin, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__)
  const auto address = reinterpret_cast<std::uintptr_t>(begin);
  const auto first = (address + kHugePage - 1) / kHugePage * kHugePage, last = (address + bytes) / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace nemo_rl
