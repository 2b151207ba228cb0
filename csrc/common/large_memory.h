// Blocks of memory in huge pages (2 MiB) where the system gives them to those who ask (Linux, transparent_hugepage =
// madvise or always). Matrices are walked through in strides of rows: with pages of 4 KiB every row is another page,
// and the processor waits for the address as for the data. A block also costs one page fault where it cost 512.
#pragma once
#include <cstddef>
#include <memory>
#include <new>

namespace nemo_rl {

inline constexpr std::size_t kHugePage = std::size_t{1} << 21;

struct FreeLarge {
  std::align_val_t alignment{64};
  void operator()(void* block) const { ::operator delete(block, alignment); }
};
using LargeBlock = std::unique_ptr<std::byte, FreeLarge>;

/// Uninitialised memory that begins at a huge page if it has room for one, else at a cache line, and asks for huge
/// pages as far as its first `used` bytes reach. That is advice: where it is not taken the block is slower.
LargeBlock allocate_large(std::size_t bytes, std::size_t used);

/// Makes the bytes zero, and gives whole pages of them back to the system, which brings new ones when they are touched.
void give_up_memory(std::byte* begin, std::size_t bytes);

}  // namespace nemo_rl
