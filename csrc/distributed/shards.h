// Messages about flat buffers of which each rank is responsible for a shard (gradient_sums.h): sums, and collections.
#pragma once
#include <memory>

#include "distributed/communicator.h"
#include "distributed/gradient_sums.h"
#include "distributed/peer_memory.h"

namespace nemo_rl::distributed {

/// Ranks of one machine read each other's buffers in place, where the system lets them; else messages carry them. The
/// results are the same bits. All ranks make the same calls, with buffers of one size and dtype.
class Shards {
 public:
  /// `in_place`: false for messages in any case.
  explicit Shards(std::shared_ptr<Communicator> ranks, bool in_place = true)
      : ranks_(std::move(ranks)), in_place_(in_place) {}
  int rank() const { return ranks_->rank(); }
  int size() const { return ranks_->size(); }
  Communicator& messages() const { return *ranks_; }
  /// How ranks read each other's memory, asked for once by all of them; nullptr where they cannot.
  const PeerMemory* memory(const char* phase);

  /// `flat` of this rank, in its own shard, becomes the sum of all ranks' along the tree. Elsewhere it keeps what it
  /// was.
  void reduce_scatter(const at::Tensor& flat, std::int64_t block, const char* phase);
  /// Every rank's shard of `flat` becomes the one of the rank that is responsible for it.
  void all_gather(const at::Tensor& flat, std::int64_t block, const char* phase);

 private:
  void sum_in_place(const PeerMemory& memory, const at::Tensor& flat, std::int64_t block, const char* phase);
  void copy_in_place(const PeerMemory& memory, const at::Tensor& flat, std::int64_t block, const char* phase);
  at::Tensor rows(at::Tensor& kept, std::int64_t count, std::int64_t n, const at::Tensor& like) const;

  std::shared_ptr<Communicator> ranks_;
  bool in_place_, asked_ = false;
  std::unique_ptr<PeerMemory> memory_;
  at::Tensor out_, in_;  ///< bytes of messages
};

}  // namespace nemo_rl::distributed
