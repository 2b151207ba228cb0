#include "common/large_memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nemo_rl {

LargeBlock allocate_large(std::size_t bytes, [[maybe_unused]] std::size_t used) {
  const std::align_val_t alignment{bytes >= kHugePage ? kHugePage : 64};
  LargeBlock block(static_cast<std::byte*>(::operator new(bytes, alignment)), FreeLarge{alignment});
#if defined(__linux__)
  if (used >= kHugePage) madvise(block.get(), used / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  return block;
}

}  // namespace nemo_rl
