// Sums over all ranks that are formed while the backward is running: a bucket of the flat gradient travels as soon as
// no layer adds to it any more, on a second thread. The sums are those of distributed/gradient_sums.h, to the bit.
#pragma once
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <vector>

#include "distributed/communicator.h"
#include "distributed/gradient_sums.h"

namespace nemo_rl::distributed {

/// One sum after the other: `begin`, `final_from` with descending arguments down to 0, `finish`. All ranks form the
/// same sums in the same order, and each takes part in every sum that another one has begun.
class GradientExchange {
 public:
  /// What one rank adds, and where the sum of all ranks goes.
  struct Round {
    /// Flat buffers [total]: the sums of this rank's earlier subtrees from the left, then the block at work. Their sum,
    /// from the right, is formed in the first.
    std::vector<at::Tensor> terms;
    at::Tensor sum;               ///< [shard]: becomes the sum of all ranks, of this rank's shard
    bool give_up_memory = false;  ///< the terms are zero afterwards, and the system has their memory
  };

  /// `ranks`: for these messages alone; they go over it from another thread. `starts`: where buckets may begin in the
  /// flat buffer of `total` elements; small ones are joined. `block`: as in `shard_of`.
  GradientExchange(std::shared_ptr<Communicator> ranks, std::vector<std::int64_t> starts, std::int64_t total,
                   std::int64_t block);
  ~GradientExchange();

  void begin(Round round);
  bool is_running() const { return work_.valid(); }
  /// Nobody writes the elements from `begin` on any more. Where memory is given up, this waits until all but a few of
  /// the buckets behind it have gone.
  void final_from(std::int64_t begin);
  /// Waits until all buckets have gone. The errors of messages end here. Returns the round, with its sum.
  Round finish();

 private:
  void work();
  void move(const Shard& bucket);
  void add_terms(const Shard& bucket) const;
  void await_final(std::int64_t begin);
  void count_gone();

  std::shared_ptr<Communicator> ranks_;
  std::vector<Shard> buckets_;  ///< from the end of the buffer to its beginning
  std::int64_t total_, block_;
  Round round_;
  at::Tensor rows_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int64_t final_ = 0;  ///< elements from here on are final
  std::size_t gone_ = 0;    ///< buckets
  bool failed_ = false;
  std::future<void> work_;  ///< the last member: the others are there until it has ended
};

}  // namespace nemo_rl::distributed
