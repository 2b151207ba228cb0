#include "distributed/gradient_exchange.h"

#include <ATen/Dispatch.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "common/check.h"
#include "runtime/large_tensor.h"
#include "runtime/tensor.h"

namespace nemo_rl::distributed {
namespace {

constexpr std::int64_t kLeastBytes = std::int64_t{4} << 20;  ///< of a bucket: smaller ones cost more messages
constexpr std::int64_t kMostBytes = std::int64_t{8} << 20;   ///< of one message
constexpr std::size_t kWaiting = 2;  ///< buckets that may wait for their message where memory is given up
/// A wait with a bound is compiled in; one without asks for the libstdc++ of GCC 12, which RHEL 9 lacks.
constexpr std::chrono::hours kLong{1};
constexpr auto kPhase = "adding the gradients of all ranks beside the backward";

/// The elements that lie in both.
Shard overlap(const Shard& a, const Shard& b) {
  const auto begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

/// a += b by this thread alone: the others belong to the backward, and ATen's own functions would take them.
void add_to(const at::Tensor& a, const at::Tensor& b) {
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "adding gradients", [&] {
    auto* __restrict to = a.mutable_data_ptr<scalar_t>();
    const auto* __restrict from = b.const_data_ptr<scalar_t>();
    for (std::int64_t i = 0, n = a.numel(); i < n; ++i) to[i] += from[i];
  });
}

void copy_to(const at::Tensor& to, const at::Tensor& from) {
  std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
}

}  // namespace

GradientExchange::GradientExchange(std::shared_ptr<Communicator> ranks, std::vector<std::int64_t> starts,
                                   std::int64_t total, std::int64_t block)
    : ranks_(std::move(ranks)), total_(total), block_(block) {
  std::ranges::sort(starts, std::greater());
  NRL_CHECK(!starts.empty() && starts.back() == 0 && starts.front() <= total, "the buckets of ", total,
            " gradients do not begin at 0");
  for (std::int64_t end = total; const auto start : starts) {
    if (start > 0 && (end - start) * static_cast<std::int64_t>(sizeof(float)) < kLeastBytes) continue;
    buckets_.push_back({start, end});
    end = start;
  }
}

GradientExchange::~GradientExchange() {
  if (!work_.valid()) return;
  {
    const std::lock_guard lock(mutex_);
    failed_ = true;
  }
  changed_.notify_all();  // and the future's own destructor waits for the message on its way, which has a deadline
}

void GradientExchange::begin(Round round) {
  NRL_CHECK(!work_.valid(), "a sum of gradients begins before the last one has ended");
  for (const auto& term : round.terms)
    NRL_CHECK(term.is_cpu() && term.is_contiguous() && term.numel() == total_, "a term of ", total_,
              " gradients was expected, got ", term.sizes());
  NRL_CHECK(
      !round.terms.empty() && round.sum.numel() == shard_of(total_, ranks_->rank(), ranks_->size(), block_).size(),
      "a sum of gradients needs terms, and room for a shard");
  round_ = std::move(round);
  final_ = total_, gone_ = 0, failed_ = false;
  work_ = std::async(std::launch::async, [this] { work(); });
}

void GradientExchange::final_from(std::int64_t begin) {
  std::unique_lock lock(mutex_);
  final_ = std::min(final_, begin);
  changed_.notify_all();
  if (!round_.give_up_memory || final_ == 0) return;
  std::size_t ready = 0;
  while (ready < buckets_.size() && buckets_[ready].begin >= final_) ++ready;
  while (!failed_ && gone_ + kWaiting < ready) changed_.wait_for(lock, kLong);
}

GradientExchange::Round GradientExchange::finish() {
  NRL_CHECK(work_.valid(), "there is no sum of gradients to finish");
  final_from(0);
  work_.get();
  return std::move(round_);
}

void GradientExchange::work() {
  try {
    for (const auto& bucket : buckets_) {
      await_final(bucket.begin);
      add_terms(bucket);
      move(bucket);
      count_gone();
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failed_ = true;
    changed_.notify_all();
    throw;
  }
}

void GradientExchange::await_final(std::int64_t begin) {
  std::unique_lock lock(mutex_);
  while (!failed_ && final_ > begin) changed_.wait_for(lock, kLong);
  NRL_CHECK(!failed_, "the sum of gradients was given up");
}

void GradientExchange::count_gone() {
  const std::lock_guard lock(mutex_);
  ++gone_;
  changed_.notify_all();
}

/// As BlockSums::take does.
void GradientExchange::add_terms(const Shard& bucket) const {
  const auto part = [&](std::size_t i) { return round_.terms[i].narrow(0, bucket.begin, bucket.size()); };
  for (auto i = round_.terms.size() - 1; i > 0; --i) {
    add_to(part(i - 1), part(i));
    if (round_.give_up_memory) runtime::give_up(part(i));
  }
}

/// Every part of the bucket goes to the rank that is responsible for it, which adds those of all ranks.
void GradientExchange::move(const Shard& bucket) {
  const auto& flat = round_.terms.front();
  const std::int64_t most = kMostBytes / static_cast<std::int64_t>(flat.element_size());
  for (int owner = ranks_->size() - 1; owner >= 0; --owner) {
    const auto shard = shard_of(total_, owner, ranks_->size(), block_);
    for (auto rest = overlap(bucket, shard); rest.size() > 0; rest.begin += most) {
      const auto n = std::min(most, rest.size());
      const auto own = flat.narrow(0, rest.begin, n);
      if (owner != ranks_->rank()) {
        ranks_->send(own, owner, kPhase);
        continue;
      }
      if (!rows_.defined()) rows_ = at::empty({ranks_->size() * most}, flat.options());
      const auto rows = rows_.narrow(0, 0, ranks_->size() * n).view({ranks_->size(), n});
      for (int r = 0; r < ranks_->size(); ++r) r == owner ? copy_to(rows[r], own) : ranks_->receive(rows[r], r, kPhase);
      along_tree(ranks_->size(), [&](std::int64_t a, std::int64_t b) { add_to(rows[a], rows[b]); });
      copy_to(round_.sum.narrow(0, rest.begin - shard.begin, n), rows[0]);
    }
  }
  if (round_.give_up_memory) runtime::give_up(flat.narrow(0, bucket.begin, bucket.size()));
}

}  // namespace nemo_rl::distributed
