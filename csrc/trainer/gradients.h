// The gradients of one model in training: the flat buffer that a backward adds to, and the sums of it over blocks of
// samples and over the processes that train together.
#pragma once
#include <memory>
#include <optional>

#include "distributed/gradient_exchange.h"
#include "distributed/shards.h"
#include "model/decoder_model.h"

namespace nemo_rl::trainer {

/// The processes that train one model together.
struct TrainedTogether {
  std::shared_ptr<distributed::Communicator> ranks;  ///< nullptr: this one alone
  /// The same ranks, for messages beside the backward; nullptr: sums are formed after it.
  std::shared_ptr<distributed::Communicator> beside;
  /// ZeRO-2: of the sums each rank has its shard alone, and a layer's gradient gives up its memory as soon as it has
  /// gone. Blocks are dealt to ranks in turns then (rank r has the blocks r, r + size, ...). Needs `beside`.
  bool shard_gradients = false;
};

class Gradients {
 public:
  /// `model` outlives this.
  Gradients(model::DecoderModel& model, TrainedTogether together);

  /// The way to the other ranks; nullptr where there are none.
  distributed::Shards* shards() { return shards_ ? &*shards_ : nullptr; }
  /// What of the flat buffers this process updates.
  distributed::Shard shard() const;
  /// The buffer that a backward adds to [total], created at the first use, and its parts.
  const at::Tensor& flat();
  const model::GradientViews& views();
  double flat_norm() const;
  /// Whether flat() holds neither an infinity nor a NaN, in no slice of the model.
  bool are_finite();

  /// Whether sums over ranks may begin in the last backward.
  bool sums_beside() const { return exchange_ != nullptr; }
  /// The last backward of the sum has come to the first layer of its way, the last of the model: what it tells of its
  /// layers. Then `backward_done`.
  model::LayerDone begin_sum();
  void backward_done();
  void abandon();

  void zero();
  void end_block();
  /// Makes of_shard() the sum of all blocks of all ranks.
  void add_all();
  /// This process's shard [shard().size()] of that sum.
  at::Tensor of_shard() const;
  /// L2 norm of the whole sum, of which each rank has its shard, and each peer its slice.
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
  std::optional<distributed::Shards> shards_;  ///< where there are other ranks
  distributed::BlockSums blocks_;  ///< of this rank; with sharded gradients shards of the sums over all ranks
  at::Tensor shard_sum_;           ///< with sharded gradients
  std::vector<std::int64_t> layer_begin_;
  std::int64_t head_begin_ = 0;
  std::unique_ptr<distributed::GradientExchange> exchange_;  ///< the last member: it writes the others
};

}  // namespace nemo_rl::trainer
