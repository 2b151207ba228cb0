// Sums whose order does not depend on who forms them. Numbered blocks are added along one fixed tree: 0 + 1, 2 + 3,
// then these pairs, and so on. A rank that holds the blocks of one subtree adds them alone, and the ranks' sums are
// added along the rest of the tree: any number of ranks gives the same bits, where each has the same power of two of
// blocks.
#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace nemo_rl::distributed {

/// Adds blocks of one process, each as large as the others, as they come.
class BlockSums {
 public:
  /// Takes block number `count()`, whose memory is then this object's.
  void add(at::Tensor block);
  /// A buffer for `spare`.
  void give_back(at::Tensor buffer) { spares_.push_back(std::move(buffer)); }
  /// A buffer that is free again; undefined where none is.
  at::Tensor spare();
  /// The sum of all blocks, in one of their buffers; after it there are none.
  at::Tensor take();
  std::int64_t count() const { return count_; }
  /// The sums of the subtrees so far, the leftmost first, whose memory is then the caller's; after it there are no
  /// blocks. `take` adds them from the right.
  std::vector<at::Tensor> take_subtrees();
  /// Forgets all blocks, and keeps their buffers.
  void clear();

 private:
  struct Subtree {
    int level;
    at::Tensor sum;
  };
  std::vector<Subtree> open_;  ///< subtrees that wait for their right neighbours, the largest first
  std::vector<at::Tensor> spares_;
  std::int64_t count_ = 0;
};

/// add(a, b) for the sums row a += row b that add `count` rows along the tree, in their order; the sum ends in row 0.
template <class F>
void along_tree(std::int64_t count, const F& add) {
  for (std::int64_t step = 1; step < count; step *= 2)
    for (std::int64_t row = 0; row + step < count; row += 2 * step) add(row, row + step);
}

/// rows[0] becomes the sum of the rows [N, n] along the tree; the others are scratch.
void add_rows(const at::Tensor& rows);

/// Elements [begin, end) of a flat buffer, which one rank is responsible for.
struct Shard {
  std::int64_t begin = 0, end = 0;
  std::int64_t size() const { return end - begin; }
};
/// Shards of equal size but for the last ones; all begin at multiples of `block` elements.
Shard shard_of(std::int64_t total, int rank, int size, std::int64_t block);

}  // namespace nemo_rl::distributed
