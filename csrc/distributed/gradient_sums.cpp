#include "distributed/gradient_sums.h"

#include <algorithm>

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {
void BlockSums::add(at::Tensor block) {
  ++count_;
  int level = 0;
  while (!open_.empty() && open_.back().level == level) {
    open_.back().sum.add_(block);
    spares_.push_back(std::move(block));
    block = std::move(open_.back().sum);
    open_.pop_back();
    ++level;
  }
  open_.push_back({level, std::move(block)});
}

at::Tensor BlockSums::spare() {
  if (spares_.empty()) return {};
  auto tensor = std::move(spares_.back());
  spares_.pop_back();
  return tensor;
}

at::Tensor BlockSums::take() {
  NRL_CHECK(!open_.empty(), "a sum of no blocks");
  while (open_.size() > 1) {
    auto right = std::move(open_.back().sum);
    open_.pop_back();
    open_.back().sum.add_(right);
    spares_.push_back(std::move(right));
  }
  auto sum = std::move(open_.back().sum);
  open_.clear();
  count_ = 0;
  return sum;
}

std::vector<at::Tensor> BlockSums::take_subtrees() {
  std::vector<at::Tensor> sums;
  for (auto& subtree : open_) sums.push_back(std::move(subtree.sum));
  open_.clear();
  count_ = 0;
  return sums;
}

void BlockSums::clear() {
  for (auto& subtree : open_) spares_.push_back(std::move(subtree.sum));
  open_.clear();
  count_ = 0;
}

void add_rows(const at::Tensor& rows) {
  along_tree(rows.size(0), [&](std::int64_t a, std::int64_t b) { rows[a].add_(rows[b]); });
}

Shard shard_of(std::int64_t total, int rank, int size, std::int64_t block) {
  const std::int64_t blocks = (total + block - 1) / block;
  const std::int64_t each = (blocks + size - 1) / size * block;
  return {std::min(total, rank * each), std::min(total, (rank + 1) * each)};
}

}  // namespace nemo_rl::distributed
