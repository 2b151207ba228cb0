// The gradients of a model in training: the flat buffer that a backward pass adds to, and its sums over gradient blocks
// and over the processes that train together.
#pragma once
#include <memory>
#include <optional>

#include "distributed/gradient_exchange.h"
#include "distributed/shards.h"
#include "model/decoder_model.h"

namespace nemo_rl::trainer {

/// The processes that train one model together.
struct TrainedTogether {
  std::shared_ptr<distributed::Communicator> ranks;  ///< nullptr: only this process
  /// The same ranks, for messages during the backward pass; nullptr: gradients are summed after it.
  std::shared_ptr<distributed::Communicator> beside;
  /// ZeRO-2: each rank keeps only its shard of the sums, and a layer's gradient is freed as soon as it has been sent.
  /// Blocks are then assigned to ranks round-robin (rank r has the blocks r, r + size, ...). Needs `beside`.
  bool shard_gradients = false;
};

class Gradients {
 public:
  /// `model` must outlive this object.
  Gradients(model::DecoderModel& model, TrainedTogether together);

  /// The connection to the other ranks; nullptr if there are none.
  distributed::Shards* shards() { return shards_ ? &*shards_ : nullptr; }
  /// The range of the flat buffers that this process updates.
  distributed::Shard shard() const;
  /// The buffer [total] that a backward pass adds to, created at first use, and its views.
  const at::Tensor& flat();
  const model::GradientViews& views();
  double flat_norm() const;
  /// Whether flat() has no infinity and no NaN, in any slice of the model.
  bool are_finite();

  /// Whether sums over ranks may begin during the last backward pass.
  bool sums_beside() const { return exchange_ != nullptr; }
  /// Begins a sum during its last backward pass, when the gradients of the head are complete. Returns the callback that
  /// this pass must call for each layer. Afterwards `backward_done` must be called.
  model::LayerDone begin_sum();
  void backward_done();
  void abandon();

  void zero();
  void end_block();
  /// Sums all blocks of all ranks; of_shard() then returns this process's shard.
  void add_all();
  /// This process's shard [shard().size()] of the sum.
  at::Tensor of_shard() const;
  /// The L2 norm of the whole sum, over the shards of all ranks and the slices of all peers.
  double norm();

 private:
  void use(at::Tensor flat);
  void use_free_buffer();
  void add_shared();
  void add_shared_of(std::size_t layer);
  void begin_round(bool with_flat);
  void end_round();
  double slice_norm();

  model::DecoderModel& model_;
  TrainedTogether together_;
  at::Tensor flat_;
  std::optional<model::GradientViews> views_;
  std::optional<distributed::Shards> shards_;  ///< if there are other ranks
  distributed::BlockSums blocks_;  ///< blocks of this rank; with sharded gradients, shards of the sums over all ranks
  at::Tensor shard_sum_;           ///< with sharded gradients
  std::vector<std::int64_t> layer_begin_;
  std::int64_t head_begin_ = 0;
  std::unique_ptr<distributed::GradientExchange> exchange_;  ///< the last member, because it writes to the others
};

}  // namespace nemo_rl::trainer
