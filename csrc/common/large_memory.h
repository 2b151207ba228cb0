// Blocks of memory in huge pages (2 MiB) where the system gives them to those who ask (Linux, transparent_hugepage = madvise or always).
// Matrices are walked through in strides of rows: with pages of 4 KiB every row is another page, and the processor waits for the address
// as for the data. A block also costs one page fault where it cost 512.
#pragma once
#include <cstddef>

namespace nemo_rl {

inline constexpr std::size_t kHugePage = std::size_t{1} << 21;

/// Where a block of so many bytes should begin: at a huge page if it has room for one, else at a cache line.
inline constexpr std::size_t large_alignment(std::size_t bytes) { return bytes >= kHugePage ? kHugePage : 64; }

/// Asks for huge pages wherever one lies within the block, before it is first written. Advice: where it is not taken the block is slower.
void advise_huge_pages(void* begin, std::size_t bytes);

}  // namespace nemo_rl
