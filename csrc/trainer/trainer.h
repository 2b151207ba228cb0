// One model being trained (or only scored): packed forward to one number a token, backward from their gradient,
// clipping and AdamW. The number is the token's log-probability, or with a value head the value of the state before it.
// The loss stands outside: it sees these numbers and returns their gradient.
#pragma once
#include <memory>
#include <optional>

#include "model/decoder_model.h"
#include "ops/adamw.h"
#include "trainer/gradients.h"
#include "trainer/kept_moves.h"
#include "trainer/packed_batch.h"
#include "trainer/token_loss.h"

namespace nemo_rl::trainer {

struct OptimizerStep {
  double grad_norm = 0;  ///< before clipping
  bool finite = true;    ///< false: nothing was changed
};

struct ForwardOptions {
  bool share_prefix = false;
  bool keep = false;        ///< a backward follows
  bool checkpoint = false;  ///< keep only layer inputs and compute the rest again
};

/// What a forward computes of the wanted tokens, or the gradient with respect to it: CPU tensors in the accumulation
/// dtype whose other entries are untouched. All but the first are optional.
struct TokenOutputs {
  at::Tensor out;         ///< log-probability (-inf where the filter removes the token); with a value head the value.
                          ///< [T, K] where the batch has targets, else shaped like its token_ids
  at::Tensor unfiltered;  ///< the same without top-k and top-p
  at::Tensor entropy;     ///< shaped like token_ids: in nats, of the unfiltered distribution at the token's place
};

/// The types of AdamW's moments: undefined is that of the master weights; or bfloat16, rounded as kernels/adamw.h says.
struct MomentTypes {
  std::optional<at::ScalarType> exp_avg, exp_avg_sq;
};

class Trainer {
 public:
  /// `together`: the processes that train one model, each a part of the samples; by default this one alone. Each holds
  /// all weights of its model (or the same slice of it: DecoderModel's `peers`), and masters and optimizer state of its
  /// own shard. The model must lie on the CPU then.
  /// `moments`: what AdamW's are kept in.
  explicit Trainer(std::shared_ptr<model::DecoderModel> model, TrainedTogether together = {}, MomentTypes moments = {});

  model::DecoderModel& model() { return *model_; }

  /// Fills `outputs`. With a value head `scoring` is the default and `out` alone is there.
  void forward(const RowBatch& batch, const std::vector<std::int64_t>& samples, const model::TokenScoring& scoring,
               const ForwardOptions& options, const TokenOutputs& outputs);

  /// The likeliest tokens at the wanted tokens' places: ids int64 [T, k] and logprobs [T, k] in the accumulation dtype,
  /// other entries untouched. The batch has no targets.
  void likeliest(const RowBatch& batch, const std::vector<std::int64_t>& samples, double temperature, bool share_prefix,
                 const at::Tensor& ids, const at::Tensor& logprobs);

  /// The same log-probabilities with the head's backward done at once, for a loss whose gradient needs single tokens
  /// (no filter, no float64, no value head; `options.keep`). `backward` without arguments does the rest.
  void forward(const RowBatch& batch, const std::vector<std::int64_t>& samples, const model::TokenScoring& scoring,
               const ForwardOptions& options, const at::Tensor& out, const TokenLoss& loss);
  /// Whether this model and scoring allow that.
  bool takes_token_loss(const model::TokenScoring& scoring) const;

  /// Next-token logits [T, V] (values [T, 1]) of one sequence, in the accumulation dtype: for inspection and tests, not
  /// for training.
  at::Tensor logits(const at::Tensor& token_ids);

  /// Adds to the gradients from those of the last forward's outputs (with keep), read at its wanted tokens.
  void backward(const TokenOutputs& d_outputs);
  /// After a forward with a loss.
  void backward();

  /// Before the passes over rows that other ranks have generated; see trainer/kept_moves.h.
  void move_kept(const RowBatch& batch, const std::vector<KeptMove>& moves);

  void zero_grad();
  /// The next backward is the last one of this global batch (with sharded gradients: of this block), so sums over all
  /// ranks may begin in it. That backward may not come: they are formed later then. Nothing to do where sums wait for
  /// the end of the backward.
  void begin_sum() { last_backward_ = gradients_.sums_beside(); }
  /// This rank has failed: it takes part in the sum that others have begun or will begin.
  void abandon_sum() { gradients_.abandon(); }
  /// Ends a block of samples: the gradients since the last end are a term of the sum of all blocks, which are added
  /// along a fixed tree (distributed/gradient_sums.h). Without any end there is one block.
  void end_block();
  /// Adds the blocks of all ranks, clips to `max_grad_norm` (none if <= 0) and updates the weights; a non-finite norm
  /// changes nothing.
  OptimizerStep step(const ops::AdamWSettings& settings, double max_grad_norm);
  /// Of what lies in grads(), on this process.
  double grad_norm() const { return gradients_.flat_norm(); }
  /// Whether grads() hold neither an infinity nor a NaN, in no slice of the model.
  bool grads_are_finite() { return gradients_.are_finite(); }
  /// Tokens so far whose forward with keep was generation's own (model/kept_activations.h).
  std::int64_t reused_tokens() const { return reused_tokens_; }

  /// What this process updates, of the flat buffers of what is trained: all of it unless there are other ranks.
  distributed::Shard shard() const { return gradients_.shard(); }
  /// Optimizer state as flat buffers, created at the first use: gradients of all that is trained (after a step those of
  /// this process's last block, or nothing where gradients are sharded), moments of the shard.
  const at::Tensor& grads() { return gradients_.flat(); }
  const at::Tensor& exp_avg();
  const at::Tensor& exp_avg_sq();
  std::int64_t optimizer_steps() const { return optimizer_steps_; }
  void set_optimizer_steps(std::int64_t steps) { optimizer_steps_ = steps; }

 private:
  bool values() const { return model_->config().value_head; }
  void update(const ops::AdamWSettings& settings, double scale);
  at::Tensor zero_moments(std::optional<at::ScalarType> type) const;
  void forward_body(const RowBatch& batch, const std::vector<std::int64_t>& samples, const ForwardOptions& options);
  std::vector<model::KeptActivations::Node> kept_nodes() const;
  at::Tensor token_rows() const;
  at::Tensor token_places() const;
  void backward_body(const at::Tensor& dh);
  std::shared_ptr<model::DecoderModel> model_;
  Gradients gradients_;
  MomentTypes moments_;
  at::Tensor exp_avg_, exp_avg_sq_;
  std::int64_t optimizer_steps_ = 0, reused_tokens_ = 0;
  model::LmHead head_;
  model::ValueHead value_head_;
  // of the last forward with keep
  PackedBatch packed_;
  at::Tensor h_;
  std::unique_ptr<model::ActivationSource> activations_;
  model::TokenScoring scoring_;
  bool has_unfiltered_ = false, has_entropy_ = false;
  std::int64_t targets_ = 1;  // K, pairs of each wanted token
  bool pending_ = false;
  bool head_done_ = false;  // its backward, by a forward with a loss
  bool last_backward_ = false;
};

}  // namespace nemo_rl::trainer
