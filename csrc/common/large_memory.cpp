#include "common/large_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
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

void give_up_memory(std::byte* begin, std::size_t bytes) {
#if defined(__linux__)
  static const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const std::size_t head = std::min(bytes, (page - reinterpret_cast<std::uintptr_t>(begin) % page) % page);
  const std::size_t whole = (bytes - head) / page * page;
  if (whole > 0 && madvise(begin + head, whole, MADV_DONTNEED) == 0) {  // memory without a file comes back as zeros
    std::memset(begin, 0, head);
    std::memset(begin + head + whole, 0, bytes - head - whole);
    return;
  }
#endif
  std::memset(begin, 0, bytes);
}

}  // namespace nemo_rl
