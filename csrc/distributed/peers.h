// The processes that hold one model in slices, as the model uses them: sums and collections of what each has.
#pragma once
#include <memory>

#include "distributed/communicator.h"

namespace nemo_rl::distributed {

/// Every call is made by all of them, with tensors of one shape and dtype. Results are the same bits on all ranks.
class Peers {
 public:
  explicit Peers(std::shared_ptr<Communicator> ranks) : ranks_(std::move(ranks)) {}
  int rank() const { return ranks_->rank(); }
  int size() const { return ranks_->size(); }

  /// x becomes the sum over all ranks: x of rank 0 + x of rank 1 + ..., element by element, in its own dtype. So a
  /// row's bits do not depend on the other rows. x is contiguous.
  void sum(const at::Tensor& x, const char* phase);
  /// x of every rank: [size, ...]; valid until the next call.
  at::Tensor gather(const at::Tensor& x, const char* phase);

 private:
  at::Tensor scratch(std::int64_t rows, const at::Tensor& like);
  std::shared_ptr<Communicator> ranks_;
  at::Tensor bytes_;
};

}  // namespace nemo_rl::distributed
