#include "distributed/gradient_sums.h"

#include <algorithm>

#include "common/check.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {
namespace {

constexpr std::int64_t kBucketBytes = std::int64_t{16} << 20;  ///< of one rank: what travels at once

/// f(offset, n) once a bucket: of rank r it holds the n elements from shard(r).begin + offset on, or what is left of
/// them.
template <class F>
void for_each_bucket(const Communicator& ranks, const at::Tensor& flat, std::int64_t block, const F& f) {
  NRL_CHECK(flat.dim() == 1 && flat.is_contiguous(), "shards are of a flat buffer, got ", flat.sizes());
  const std::int64_t longest = shard_of(flat.numel(), 0, ranks.size(), block).size();
  const std::int64_t bucket = std::min<std::int64_t>(longest, kBucketBytes / flat.element_size());
  for (std::int64_t offset = 0; offset < longest; offset += bucket) f(offset, std::min(bucket, longest - offset));
}

/// The part of rank r's shard in a bucket; it may be empty.
at::Tensor part(const Communicator& ranks, const at::Tensor& flat, std::int64_t block, int r, std::int64_t offset,
                std::int64_t n) {
  const auto shard = shard_of(flat.numel(), r, ranks.size(), block);
  const std::int64_t begin = std::min(shard.end, shard.begin + offset);
  return flat.narrow(0, begin, std::min(n, shard.end - begin));
}

}  // namespace

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

void reduce_scatter(Communicator& ranks, const at::Tensor& flat, std::int64_t block, const char* phase) {
  if (ranks.size() == 1) return;
  for_each_bucket(ranks, flat, block, [&](std::int64_t offset, std::int64_t n) {
    const auto mine = at::empty({ranks.size(), n}, flat.options()), theirs = at::empty_like(mine);
    for (int r = 0; r < ranks.size(); ++r) {
      const auto from = part(ranks, flat, block, r, offset, n);
      mine[r].narrow(0, 0, from.numel()).copy_(from);
    }
    ranks.all_to_all(theirs, mine, phase);
    const auto own = part(ranks, flat, block, ranks.rank(), offset, n);
    if (own.numel() == 0) return;
    add_rows(theirs);
    own.copy_(theirs[0].narrow(0, 0, own.numel()));
  });
}

void all_gather_shards(Communicator& ranks, const at::Tensor& flat, std::int64_t block, const char* phase) {
  if (ranks.size() == 1) return;
  for_each_bucket(ranks, flat, block, [&](std::int64_t offset, std::int64_t n) {
    const auto mine = at::empty({n}, flat.options()), all = at::empty({ranks.size(), n}, flat.options());
    const auto own = part(ranks, flat, block, ranks.rank(), offset, n);
    mine.narrow(0, 0, own.numel()).copy_(own);
    ranks.all_gather(all, mine, phase);
    for (int r = 0; r < ranks.size(); ++r) {
      const auto to = part(ranks, flat, block, r, offset, n);
      to.copy_(all[r].narrow(0, 0, to.numel()));
    }
  });
}

}  // namespace nemo_rl::distributed
